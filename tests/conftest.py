"""What must be so before any test module is imported."""

from __future__ import annotations

import os

# The supervisor's tests fork a process in which other tests have used gRPC, whose own work after a fork can abort the
# child before it becomes another program. `pdserve up` itself never loads gRPC.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
