"""Steps that follow one another: what the step before had made is kept, and gives the same bits as if made anew."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence

import pytest
import torch

from pdserve.engine.attention import Span, Turn, begun_blocks
from pdserve.engine.native.attention import NativeAttention, NativeSteps
from pdserve.engine.native.library import Kernels
from tests.support.native_kernels import ALL, EACH_VARIANT
from tests.unit.engine_native.test_attention import KINDS, LAYER, World

FIRST = next((kernels for kernels in ALL.values() if kernels is not None), None)


class Decoding:
    """Sequences that decode together over one pool, each step made twice: from the step before, and anew."""

    def __init__(self, kernels: Kernels, kind: str) -> None:
        self.world = World(kernels, KINDS[kind])
        self.steps = NativeSteps(kernels, self.world.pool, self.world.heads)
        self.made: list[NativeAttention] = []

    def start(self, length: int) -> tuple[list[int], int]:
        """A sequence with so many positions before its first step: its block table, which grows, and its length."""
        table = self.world.table(length + 1)
        if length:
            self.world.attend([Span(0, length, 0, table)], self.world.history(length))
        return table, length

    def step(self, rows: Sequence[tuple[list[int], int]]) -> None:
        """One token of each."""
        world, size = self.world, self.world.kind.block_size
        for table, start in rows:
            if start // size == len(table):
                table += world.table(size)
        spans = [Span(row, 1, start, table) for row, (table, start) in enumerate(rows)]
        projected = world.history(len(rows))
        anew = world.attend(spans, projected.clone())
        world.pool.begin_blocks(begun_blocks(spans, size))
        turn = Turn(
            lambda *_: projected, world.rotary.turns(torch.tensor([span.start for span in spans])), world.norm
        )
        kept = self.steps.of(spans)
        self.made.append(kept)
        assert torch.equal(kept.attend(LAYER, projected, turn), anew), [span.start for span in spans]

    def num_kept(self) -> int:
        """Steps that were made from the one before."""
        return sum(1 for before, after in zip(self.made, self.made[1:], strict=False) if before is after)


@pytest.mark.parametrize("kernels", EACH_VARIANT)
@pytest.mark.parametrize("kind", ["plain", "normalised heads", "head of 256, small blocks", "large blocks"])
def test_kept_steps_give_the_bits_of_new_ones(kernels: Kernels, kind: str) -> None:
    decoding = Decoding(kernels, kind)
    rows = [decoding.start(length) for length in (0, 17, 240)]
    for number in range(40):
        decoding.step([(table, length + number) for table, length in rows])
    assert decoding.num_kept() == 38, "all but the first, and the one in which a row begins another span"


@pytest.mark.parametrize("kernels", EACH_VARIANT)
def test_windows_are_made_anew(kernels: Kernels) -> None:
    decoding = Decoding(kernels, "window in a tile")
    table, length = decoding.start(70)
    for number in range(20):
        decoding.step([(table, length + number)])
    assert decoding.num_kept() == 0


@pytest.mark.skipif(FIRST is None, reason="no variant of the kernels runs here")
def test_another_table_company_or_order_is_another_kind_of_step() -> None:
    assert FIRST is not None
    decoding = Decoding(FIRST, "plain")
    (one, _), (two, _), (three, _) = (decoding.start(length) for length in (20, 30, 40))
    decoding.step([(one, 20), (two, 30)])
    decoding.step([(one, 21), (two, 31)])
    assert decoding.num_kept() == 1
    decoding.step([(two, 32), (one, 22)])  # another order
    decoding.step([(two, 33), (one, 23), (three, 40)])  # one came
    decoding.step([(two, 34), (one, 24)])  # and left
    moved = [*two]
    decoding.step(
        [(moved, 35), (one, 25)]
    )  # taken back and computed again: another list, if with the same blocks
    decoding.step([(moved, 35), (one, 26)])  # one stands still
    assert decoding.num_kept() == 1


@pytest.mark.skipif(FIRST is None, reason="no variant of the kernels runs here")
def test_a_step_takes_no_more_memory_behind_a_long_context() -> None:
    assert FIRST is not None

    def most_bytes(length: int) -> int:
        """That Python holds at once while it prepares one of ten steps."""
        assert FIRST is not None
        decoding = Decoding(FIRST, "plain")
        table = list(range(length // 16 + 2))
        most = 0
        spans = [[Span(0, 1, length + number, table)] for number in range(10)]
        decoding.steps.of(spans[0])
        tracemalloc.start()
        try:
            for each in spans[1:]:
                tracemalloc.reset_peak()
                before = tracemalloc.get_traced_memory()[0]
                decoding.steps.of(each)
                most = max(most, tracemalloc.get_traced_memory()[1] - before)
        finally:
            tracemalloc.stop()
        return most

    most_bytes(100)  # whatever is made once
    assert most_bytes(3_000) <= most_bytes(100) + 200
