"""Ranks on devices, each with a pool of its own: the tokens of one rank, and blocks that links can take apart."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from pdserve.engine.device.devices import CpuDevice, DeviceBytes
from pdserve.engine.parallel.parallel_runner import ParallelLaunches
from pdserve.engine.port import LaunchingRunner, Row, SampleSpec
from pdserve.kv_memory import ByteSpan
from tests.support.memories import pool_bytes
from tests.support.thread_team import DeviceRanks, ThreadTeam
from tests.unit.engine_device.driving import BFLOAT16, make_device_runner
from tests.unit.engine_device.test_device_engine import texts
from tests.unit.engine_parallel.test_ranks_as_one import (
    GQA,
    NUM_BLOCKS,
    PROMPTS,
    TABLES,
    assert_same,
    told,
    whole,
)
from tests.unit.engine_torch.driving import make_runner, sample_key
from tests.unit.engine_torch.random_model import write_random_model


@contextmanager
def device_ranks(
    folder: Path, size: int, devices: list[CpuDevice] | None = None, **settings: Any
) -> Iterator[DeviceRanks]:
    def make(team: ThreadTeam) -> Any:
        device = devices[team.shard.rank] if devices else CpuDevice()
        return make_device_runner(folder, team=team, device=device, **settings)

    made = DeviceRanks(size, make)
    yield made
    made.close()


@pytest.mark.parametrize("size", [2, 4])
def test_they_give_the_tokens_of_one(tmp_path: Path, size: int) -> None:
    """2 KV heads: of 4 ranks, 2 have the same one. In chunks and together, drawn, scored, in graphs."""
    folder = write_random_model(tmp_path, attention_bias=True, mlp_bias=True, **GQA)
    with device_ranks(folder, size) as parallel:
        assert_same(told(parallel.runner), told(whole(folder)))


@pytest.mark.parametrize("size", [2, 4])
def test_steps_launched_ahead_go_on_with_the_tokens_of_the_first(tmp_path: Path, size: int) -> None:
    folder = write_random_model(tmp_path, **GQA)
    devices = [CpuDevice() for _ in range(size)]
    with device_ranks(folder, size, devices) as parallel:
        assert isinstance(parallel.runner, LaunchingRunner)
        assert texts(parallel.runner) == texts(make_runner(folder, num_blocks=64))
    assert min(device.num_replayed for device in devices) > 20


def test_behind_a_row_that_fails_the_others_go_on(tmp_path: Path) -> None:
    """It is told to no rank, so their places are others than the engine's."""
    folder = write_random_model(tmp_path, **GQA)
    prompt = PROMPTS[0]
    spec = SampleSpec(sample_key(), prompt, len(prompt))
    ahead = SampleSpec(sample_key(), prompt, len(prompt), num_unknown=1)
    with device_ranks(folder, 2) as parallel:
        runner = parallel.runner
        bad = Row([1, 2], 0, [999], SampleSpec(sample_key(), (1, 2), 2))
        first = runner.launch([bad, Row(prompt, 0, TABLES[0], spec)])
        second = runner.launch([Row([0], len(prompt), TABLES[0], ahead)], {0: 1})
        failed, one = runner.collect(first)
        (two,) = runner.collect(second)
        assert failed.error is not None
        assert runner.collect(runner.launch([bad]))[0].error is not None
    single = whole(folder)
    want = single.run([Row(prompt, 0, TABLES[0], spec)])[0].token_id
    assert want is not None and one.token_id == want
    behind = SampleSpec(sample_key(), (*prompt, want), len(prompt))
    assert single.run([Row([want], len(prompt), TABLES[0], behind)])[0].token_id == two.token_id


def test_sixteen_bits_too(tmp_path: Path) -> None:
    folder = write_random_model(tmp_path, dtype=torch.bfloat16, **GQA)
    with device_ranks(folder, 4, precision=BFLOAT16) as parallel:
        got = told(parallel.runner)[:3]
    assert_same(got, told(make_device_runner(folder, precision=BFLOAT16))[:3], tolerance=0.1)


@pytest.mark.parametrize("size", [2, 4])
def test_a_block_is_the_parts_of_all_ranks(tmp_path: Path, size: int) -> None:
    folder = write_random_model(tmp_path, **GQA)
    single = whole(folder)
    told(single)
    with device_ranks(folder, size, num_blocks=NUM_BLOCKS) as parallel:
        told(parallel.runner)
        assert parallel.runner.layout == single.layout
        for block in TABLES[0]:
            size_bytes = single.layout.block_bytes
            span = ByteSpan(block * size_bytes, size_bytes)
            got = bytearray(size_bytes)
            for offset, own, part in parallel.pool.pieces(span):
                for rank in parallel.pool.holders[part]:
                    got[offset : offset + own.num_bytes] = parallel.pool.pools[rank].view(own)
            ours, theirs = (
                torch.frombuffer(each, dtype=torch.float32)
                for each in (got, bytearray(pool_bytes(single)[span.start : span.end]))
            )
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_the_pool_is_as_large_as_the_smallest_rank_has_room_for(tmp_path: Path) -> None:
    folder = write_random_model(tmp_path, **GQA)
    rooms = [1 << 24, 1 << 22, 1 << 23]
    alone = []
    for room in rooms:
        device = CpuDevice(DeviceBytes(total=room, free=room, held=0, peak=0))
        with device_ranks(folder, 2, [device, device], num_blocks=None) as parallel:
            alone.append(parallel.runner.layout.num_blocks)
    devices = [CpuDevice(DeviceBytes(total=room, free=room, held=0, peak=0)) for room in rooms[:2]]
    with device_ranks(folder, 2, devices, num_blocks=None) as parallel:
        assert [rank.layout.num_blocks for rank in parallel.ranks] == [alone[1]] * 2
        assert alone[1] < alone[2] < alone[0]


def test_a_graph_is_what_all_ranks_replay(tmp_path: Path) -> None:
    folder = write_random_model(tmp_path, **GQA)
    devices = [CpuDevice(), CpuDevice()]
    with device_ranks(folder, 2, devices) as parallel:
        told(parallel.runner)
        assert isinstance(parallel.runner, ParallelLaunches)
    assert devices[0].num_replayed == devices[1].num_replayed > 0
    assert devices[0].num_captured == devices[1].num_captured > 0
