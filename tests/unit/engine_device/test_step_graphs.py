"""Steps of single tokens are replays of graphs, padded to the next number of rows."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from pdserve.engine.device.devices import CpuDevice
from pdserve.engine.device.step_graphs import row_buckets
from tests.support.random_families import save_random
from tests.unit.engine_device.driving import make_device_runner
from tests.unit.engine_torch.driving import Stream, advance
from tests.unit.engine_torch.random_model import write_random_model


def test_buckets_rise_to_the_largest_batch_and_waste_little() -> None:
    assert row_buckets(1) == [1]
    assert row_buckets(8) == [1, 2, 4, 8]
    assert row_buckets(10) == [1, 2, 4, 8, 10]
    for most in (64, 100, 256, 1024):
        buckets = row_buckets(most)
        assert buckets == sorted(set(buckets))
        assert buckets[-1] == most
        assert all(high - low <= max(4, low / 2) for low, high in itertools.pairwise(buckets))
        assert len(buckets) <= 40


@pytest.mark.parametrize("num_rows", [1, 2, 3, 5, 6])
def test_decodes_are_replayed_and_give_what_other_steps_give(num_rows: int, tmp_path: Path) -> None:
    """A chunk of one token that doesn't sample keeps its place, too."""
    folder = write_random_model(tmp_path)
    device = CpuDevice()
    runner = make_device_runner(folder, device=device, max_batch=6)
    eager = make_device_runner(folder, device=CpuDevice(), max_batch=6)
    eager._graphs = None
    assert device.num_captured == len(row_buckets(6))
    ids: list[list[list[int]]] = []
    for each in (runner, eager):
        streams = [
            Stream(list(range(5 + row, 30 + 2 * row)), [row * 6 + at for at in range(6)])
            for row in range(num_rows)
        ]
        advance(each, [(stream, 20) for stream in streams])
        replayed = device.num_replayed
        for _ in range(15):
            advance(each, [(stream, 1) for stream in streams])
        assert device.num_replayed - replayed == (15 if each is runner else 0)
        ids.append([stream.ids for stream in streams])
    assert ids[0] == ids[1]


def test_steps_with_chunks_and_larger_ones_are_not(tmp_path: Path) -> None:
    device = CpuDevice()
    runner = make_device_runner(write_random_model(tmp_path), device=device, max_batch=2)
    streams = [Stream(list(range(9, 20)), [row]) for row in range(3)]
    advance(runner, [(streams[0], 11), (streams[1], 1)])
    advance(runner, [(stream, 1) for stream in streams])
    assert device.num_replayed == 0


def test_experts_wait_for_their_router_so_nothing_is_captured(tmp_path: Path) -> None:
    device = CpuDevice()
    make_device_runner(save_random("mixtral", tmp_path), device=device)
    assert device.num_captured == 0
