"""Everything that only a GPU can prove, on one, in eight minutes: `python scripts/gpu_check.py --json gpu.json`.

Needs this repository's requirements and a torch for CUDA; nothing is fetched. With --dry-run it runs anywhere: a small
model on the CPU, doubles in place of NCCL, CUDA IPC and copies to the host.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from scripts.gpu.plan import CheckStep, main

STEPS = (
    CheckStep("environment", ("environment",), 30.0),
    CheckStep("kernels", ("kernels",), 60.0),
    CheckStep("engine", ("engine",), 90.0),
    CheckStep("speed", ("speed",), 90.0),
    CheckStep("cuda_ipc", ("links", "--kind", "cuda_ipc"), 60.0),
    CheckStep("nccl", ("links", "--kind", "nccl"), 90.0),
    CheckStep("stream", ("links", "--kind", "stream"), 60.0),
    CheckStep("stream_to_cpu", ("links", "--kind", "stream", "--on-cpu", "d"), 60.0),
    CheckStep("stream_from_cpu", ("links", "--kind", "stream", "--on-cpu", "p"), 60.0),
    CheckStep("cluster", ("cluster", "--kind", "cuda_ipc"), 120.0),
)

if __name__ == "__main__":
    sys.exit(main(STEPS, __doc__))
