"""A model divided between two GPUs, and links between them: `python scripts/multi_gpu_check.py --json gpus.json`.

As scripts/gpu_check.py, which comes first.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from scripts.gpu.plan import CheckStep, main

_APART = ("--gpus", "0,1")
STEPS = (
    CheckStep("environment", ("environment", *_APART), 30.0),
    CheckStep("ranks", ("ranks", *_APART), 90.0),
    CheckStep("cuda_ipc", ("links", "--kind", "cuda_ipc", *_APART), 60.0),
    CheckStep("cuda_ipc_back", ("links", "--kind", "cuda_ipc", "--gpus", "1,0"), 60.0),
    CheckStep("nccl", ("links", "--kind", "nccl", *_APART), 90.0),
    # What goes between hosts: no peer access, no shared memory.
    CheckStep(
        "nccl_by_sockets",
        ("links", "--kind", "nccl", *_APART),
        90.0,
        {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1"},
    ),
)

if __name__ == "__main__":
    sys.exit(main(STEPS, __doc__))
