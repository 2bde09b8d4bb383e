"""What must be so before any test module is imported."""

from __future__ import annotations

import os

from hypothesis import settings

# The supervisor's tests fork a process in which other tests have used gRPC, whose own work after a fork can abort the
# child before it becomes another program. `pdserve up` itself never loads gRPC.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")

# How long an example takes depends on what else the machine does.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")
