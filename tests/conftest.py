"""What must be so before any test module is imported."""

from __future__ import annotations

import os

from hypothesis import settings

# The supervisor's tests fork a process in which other tests have used gRPC, whose own work after a fork can abort the
# child before it becomes another program. `pdserve up` itself never loads gRPC.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")

# Ray reads these when it is imported: loopback only, no token, and nothing is told to its makers.
os.environ.update(
    RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0",
    RAY_AUTH_MODE="disabled",
    RAY_USAGE_STATS_ENABLED="0",
    RAY_raylet_start_wait_time_s="120",
)

# How long an example takes depends on what else the machine does.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")
