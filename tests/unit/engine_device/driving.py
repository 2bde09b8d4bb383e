"""A runner on torch's CPU device, which goes through the code that a GPU's goes through."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from pdserve.engine.device.devices import CpuDevice
from pdserve.engine.device.runner import DeviceRunner
from pdserve.engine.numerics import LinearKind, Precision
from pdserve.engine.parallel.team import ALONE, Team
from tests.unit.engine_torch.driving import BLOCK_SIZE

FLOAT32 = Precision("float32", torch.float32, torch.float32, LinearKind.PLAIN, torch.device("cpu"))
FP8_KV = Precision("float32", torch.float32, torch.float8_e4m3fn, LinearKind.PLAIN, torch.device("cpu"))
BFLOAT16 = Precision("bfloat16", torch.bfloat16, torch.bfloat16, LinearKind.PLAIN, torch.device("cpu"))


def make_device_runner(
    folder: Path,
    *,
    precision: Precision = FLOAT32,
    num_blocks: int | None = 64,
    max_batch: int = 4,
    device: CpuDevice | None = None,
    team: Team = ALONE,
    on_loaded: Callable[[int], None] | None = None,
) -> DeviceRunner:
    """Its pool is full of NaN: nothing may read what nobody wrote."""
    runner = DeviceRunner(
        folder,
        device or CpuDevice(),
        precision=precision,
        num_blocks=num_blocks,
        utilization=0.9,
        block_size=BLOCK_SIZE,
        max_step_tokens=64,
        max_batch=max_batch,
        team=team,
        on_loaded=on_loaded,
    )
    runner._pool.indexed.fill_(0x7F if precision is FP8_KV else float("nan"))
    return runner
