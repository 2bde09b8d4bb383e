"""Steady decoding leaves nothing behind but the tokens, and a step needs no more the longer it has gone on."""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections.abc import Sequence as Seq

from pdserve.engine.engine import Engine
from pdserve.engine.fake_runner import FakeRunner
from pdserve.engine.port import Row, RowOutput
from pdserve.engine.scheduler import EngineLimits
from tests.support.virtual_clock import VirtualClock
from tests.unit.engine_core.building import sequence, start_local

NUM_SEQS, NUM_STEPS, BLOCK_SIZE = 8, 1_000, 16


class SteadyRunner(FakeRunner):
    """Computes nothing and always samples the same token: what is counted is the engine's."""

    def run(self, rows: Seq[Row]) -> list[RowOutput]:
        return [RowOutput(7) for _ in rows]


def decoding() -> Engine:
    blocks = NUM_SEQS * (2 * NUM_STEPS // BLOCK_SIZE + 2)
    engine = Engine(
        SteadyRunner(num_blocks=blocks, block_size=BLOCK_SIZE),
        EngineLimits(prefix_cache=False),
        VirtualClock(),
    )
    for handle in range(NUM_SEQS):
        start_local(engine, sequence([1] * 6, 2 * NUM_STEPS, handle=handle))
    for _ in range(100):
        engine.step()
    return engine


def test_a_thousand_steps_leave_only_tokens_and_blocks() -> None:
    engine = decoding()
    gc.collect()
    before = sys.getallocatedblocks()
    for _ in range(NUM_STEPS):
        engine.step()
    gc.collect()
    left = sys.getallocatedblocks() - before
    num_blocks = NUM_SEQS * NUM_STEPS // BLOCK_SIZE
    # A block's number and its count may be objects; the token's id is a small number, and the lists grow in place.
    assert left <= 4 * num_blocks, left / NUM_STEPS


def test_a_late_step_needs_no_more_than_an_early_one() -> None:
    engine = decoding()

    def most_bytes() -> int:
        most = 0
        for _ in range(BLOCK_SIZE):  # one of them begins a block
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            engine.step()
            most = max(most, tracemalloc.get_traced_memory()[1] - before)
        return most

    tracemalloc.start()
    try:
        most_bytes()
        early = most_bytes()
        for _ in range(NUM_STEPS // 2):
            engine.step()
        late = most_bytes()
    finally:
        tracemalloc.stop()
    assert late <= early + 1_024  # a list of ids that grows at this moment is copied: it is no part of a step
