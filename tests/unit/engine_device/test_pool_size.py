"""Blocks from what weights and the largest step leave, and the message in figures when that isn't enough."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pdserve.engine.device.devices import CpuDevice, DeviceBytes
from pdserve.engine.device.pool_size import fitting_on, pool_size
from pdserve.engine.layout import KvLayout
from pdserve.errors import Incompatible
from tests.unit.engine_device.driving import make_device_runner
from tests.unit.engine_torch.random_model import write_random_model

LAYOUT = KvLayout(
    num_blocks=1, kv_heads=8, layers=32, block_size=16, head_dim=128, dtype="bfloat16", item_bytes=2
)
GB = 10**9
# 80 GB, of which another process has 5, the weights 16, and a step takes 3 more.
AFTER = DeviceBytes(total=80 * GB, free=59 * GB, held=16 * GB, peak=19 * GB)


def test_what_is_left_becomes_blocks() -> None:
    left = int(0.9 * 80 * GB) - 16 * GB - 2 * 3 * GB
    fitting = left // LAYOUT.block_bytes - 1
    assert pool_size(AFTER, LAYOUT, utilization=0.9, num_blocks=None) == fitting
    assert pool_size(AFTER, LAYOUT, utilization=0.9, num_blocks=fitting) == fitting
    assert pool_size(AFTER, LAYOUT, utilization=0.9, num_blocks=7) == 7


def test_two_workers_on_one_device_take_a_part_each() -> None:
    second = replace(AFTER, free=int(0.55 * 80 * GB) - 16 * GB)
    parts = [pool_size(after, LAYOUT, utilization=0.45, num_blocks=None) for after in (AFTER, second)]
    assert parts[0] == parts[1] > 0
    # With more than is left, the second one takes what is left.
    left = second.free + 16 * GB - 16 * GB - 2 * 3 * GB
    assert pool_size(second, LAYOUT, utilization=0.9, num_blocks=None) == left // LAYOUT.block_bytes - 1


@pytest.mark.parametrize(
    ("after", "utilization", "num_blocks"),
    [(AFTER, 0.9, 100_000), (AFTER, 0.25, None), (replace(AFTER, peak=60 * GB), 0.9, None)],
)
def test_what_does_not_fit_is_said_in_figures(
    after: DeviceBytes, utilization: float, num_blocks: int | None
) -> None:
    with pytest.raises(Incompatible, match="too little memory") as raised:
        pool_size(after, LAYOUT, utilization=utilization, num_blocks=num_blocks)
    for figure in ("device_gb=80", "others_gb=5", "weights_gb=16", f"utilization={utilization}"):
        assert figure in str(raised.value)


def test_a_device_that_runs_out_at_load_is_said_in_figures() -> None:
    with (
        pytest.raises(Incompatible, match=r"one step.*device_gb=80,.*free_gb=59,"),
        fitting_on(CpuDevice(AFTER)),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory")


def test_a_runner_takes_what_is_left(tmp_path: Path) -> None:
    folder = write_random_model(tmp_path)
    one = make_device_runner(folder, num_blocks=1).layout
    has = DeviceBytes(total=100 * one.block_bytes, free=100 * one.block_bytes, held=0, peak=0)
    runner = make_device_runner(folder, num_blocks=None, device=CpuDevice(has))
    assert runner.layout.num_blocks == 89  # nine tenths, and the spare one
    assert runner.pool.num_bytes == 89 * one.block_bytes
