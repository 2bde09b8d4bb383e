"""What goes into a step: budgets, order, fairness, and those that run alone."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import pytest

from pdserve.engine.engine import Engine
from pdserve.engine.events import Sampled
from pdserve.engine.fake_runner import FakeRunner
from pdserve.engine.port import Row, RowOutput
from pdserve.engine.scheduler import EngineLimits
from pdserve.engine.sequence import Sequence, SequenceState
from tests.support.virtual_clock import VirtualClock
from tests.unit.engine_core.building import run_out, sequence, start_local


class RecordingRunner(FakeRunner):
    """The fake model, and a list of what each step computed."""

    def __init__(self, *, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks=num_blocks, block_size=block_size)
        self.steps: list[list[tuple[int, int]]] = []

    def run(self, rows: Seq[Row]) -> list[RowOutput]:
        self.steps.append([(row.token_ids[0], len(row.token_ids)) for row in rows])
        return super().run(rows)


def recorded(limits: EngineLimits, num_blocks: int = 1000) -> tuple[Engine, list[list[tuple[int, int]]]]:
    """An engine, and for each of its steps the (first token id, number of tokens) of each row."""
    runner = RecordingRunner(num_blocks=num_blocks, block_size=16)
    return Engine(runner, limits, VirtualClock()), runner.steps


def start(target: Engine, handle: int, length: int, max_tokens: int = 8, strikes: int = 0) -> Sequence:
    """A sequence whose prompt repeats its handle."""
    return start_local(target, sequence([handle] * length, max_tokens, handle=handle, strikes=strikes))


def test_chunks_go_by_admission_and_fill_the_budget() -> None:
    target, steps = recorded(EngineLimits(max_step_tokens=100, chunk_tokens=100, decode_prefill_tokens=None))
    for handle, length in ((1, 150), (2, 30), (3, 60)):
        start(target, handle, length, max_tokens=1)
    run_out(target)
    assert steps == [[(1, 50), (2, 30), (3, 20)], [(1, 100)], [(3, 40)]]


class SlowRunner(RecordingRunner):
    """The same, on a machine that computes so many positions a second."""

    def __init__(self, clock: VirtualClock, tokens_per_s: float) -> None:
        super().__init__(num_blocks=1000, block_size=16)
        self._clock = clock
        self.tokens_per_s = tokens_per_s
        self.took_s: list[float] = []

    def run(self, rows: Seq[Row]) -> list[RowOutput]:
        self.took_s.append(sum(len(row.token_ids) for row in rows) / self.tokens_per_s)
        self._clock.advance(self.took_s[-1])
        return super().run(rows)


def test_chunks_shrink_to_what_a_slow_engine_computes_in_its_time_and_grow_again() -> None:
    clock = VirtualClock()
    runner = SlowRunner(clock, 25.0)
    target = Engine(runner, EngineLimits(decode_prefill_tokens=None, prefill_step_s=2.0), clock)
    start(target, 1, 2_000, max_tokens=1)
    run_out(target)
    assert [rows[0][1] for rows in runner.steps[:4]] == [
        512,
        512,
        32,
        32,
    ]  # the first step says nothing of speed
    assert max(runner.took_s[2:]) < 2.0
    runner.tokens_per_s = 10_000.0
    for handle in range(2, 5):
        start(target, handle, 4_000, max_tokens=1)
        run_out(target)
    assert runner.steps[-2][0][1] == 512


def test_the_slowest_engine_computes_sixteen_positions_a_step() -> None:
    limits = EngineLimits(max_step_tokens=512)
    assert [limits.most_prefill_tokens(rate) for rate in (0.0, 0.1, 7.9, 16.0, 1_000.0)] == [
        512,
        16,
        16,
        32,
        512,
    ]


def test_a_short_prompt_does_not_wait_for_a_long_one_that_is_being_computed() -> None:
    target, steps = recorded(EngineLimits(max_step_tokens=100, chunk_tokens=100, decode_prefill_tokens=None))
    start(target, 1, 1_000, max_tokens=1)
    target.step()
    start(target, 2, 40, max_tokens=1)
    target.step()
    assert steps == [[(1, 100)], [(1, 50), (2, 40)]]


def test_however_many_short_prompts_come_a_long_one_gets_half_of_every_step() -> None:
    limits = EngineLimits(max_step_tokens=100, chunk_tokens=100, decode_prefill_tokens=None)
    target, steps = recorded(limits, num_blocks=10_000)
    start(target, 1, 1_000, max_tokens=1)
    for handle in range(2, 60):
        start(target, handle, 30, max_tokens=1)
    target.step()
    assert steps[-1] == [(1, 50), (2, 30), (3, 20)]
    while len(steps) < 18:  # the last 100 tokens of the long one are short themselves, and the oldest
        target.step()
        assert steps[-1][0] == (1, 50)
    target.step()
    assert steps[-1] == [(1, 100)]


def test_long_prompts_share_their_half_oldest_first_and_short_ones_wait_for_no_more() -> None:
    target, steps = recorded(EngineLimits(max_step_tokens=100, chunk_tokens=30, decode_prefill_tokens=None))
    start(target, 1, 200, max_tokens=1)
    start(target, 2, 300, max_tokens=1)
    start(target, 3, 10, max_tokens=1)
    target.step()
    assert steps == [[(1, 30), (2, 20), (3, 10)]]


def test_chunk_tokens_bound_one_sequence_only() -> None:
    target, steps = recorded(EngineLimits(max_step_tokens=100, chunk_tokens=40, decode_prefill_tokens=None))
    start(target, 1, 90, max_tokens=1)
    start(target, 2, 70, max_tokens=1)
    run_out(target)
    assert steps == [[(1, 40), (2, 40)], [(1, 40), (2, 30)], [(1, 10)]]


def test_decodes_come_first_and_both_mixes_full_chunks() -> None:
    target, steps = recorded(EngineLimits(max_step_tokens=70, decode_prefill_tokens=None))
    running = start(target, 1, 10, max_tokens=6)
    target.step()
    start(target, 2, 200, max_tokens=1)
    run_out(target)
    assert [[n for _, n in step] for step in steps[1:4]] == [[1, 69], [1, 69], [1, 62]]
    assert running.state is SequenceState.ENDED


def test_a_decode_worker_prefills_little_while_others_run_and_much_when_alone() -> None:
    target, steps = recorded(EngineLimits(decode_prefill_tokens=64))
    start(target, 1, 10, max_tokens=4)
    target.step()
    start(target, 2, 700, max_tokens=1)
    run_out(target)
    assert [[n for _, n in step] for step in steps] == [[10], [1, 64], [1, 64], [1, 64], [508]]


def test_no_decode_row_is_left_out_for_a_chunk_and_prefills_do_not_starve() -> None:
    limits = EngineLimits(max_step_tokens=9, max_batch=8, decode_prefill_tokens=None)
    target, steps = recorded(limits)
    for handle in range(1, 9):
        start(target, handle, 1, max_tokens=50)
    run_steps(target, 2)
    start(target, 100, 20, max_tokens=1)
    begun = len(steps)
    while not any(row[0] == 100 for row in steps[-1]) or len(steps) < begun + 20:
        target.step()
    for step in steps[begun:]:
        assert [n for _, n in step[:8]] == [1] * 8
        assert step[8:] == [(100, 1)]


def run_steps(target: Engine, num_steps: int) -> list[Sampled]:
    return [event for _ in range(num_steps) for event in target.step() if isinstance(event, Sampled)]


def test_more_running_than_rows_take_turns() -> None:
    target, _ = recorded(EngineLimits(max_batch=2, decode_prefill_tokens=None))
    for handle in range(1, 6):
        start(target, handle, 3, max_tokens=30)
    while any(seq.state is SequenceState.PREFILLING for seq in target.sequences):
        target.step()
    sampled = run_steps(target, 10)
    assert len(sampled) == 20
    counts = [sum(event.seq.handle == handle for event in sampled) for handle in range(1, 6)]
    assert counts == [4, 4, 4, 4, 4]


def test_a_struck_sequence_runs_alone_every_other_step() -> None:
    target, steps = recorded(EngineLimits(decode_prefill_tokens=None, chunk_tokens=40))
    start(target, 1, 30, max_tokens=6)
    start(target, 2, 100, max_tokens=3, strikes=1)
    start(target, 3, 30, max_tokens=6)
    run_out(target)
    assert [[n for _, n in step] for step in steps[:6]] == [[40], [30, 30], [40], [1, 1], [20], [1, 1]]
    alone = [step for step in steps if len(step) == 1]
    assert len(alone) == 3 + 2


def test_struck_sequences_take_turns_and_need_no_others() -> None:
    target, steps = recorded(EngineLimits())
    for handle in (1, 2):
        start(target, handle, 5, max_tokens=3, strikes=1)
    run_out(target)
    assert all(len(step) == 1 for step in steps)
    assert [step[0][0] for step in steps[:2]] == [1, 2]
    assert len(steps) == 6


def test_new_sequences_join_a_running_batch() -> None:
    target, steps = recorded(EngineLimits(decode_prefill_tokens=None))
    start(target, 1, 10, max_tokens=5)
    target.step()
    target.step()
    start(target, 2, 10, max_tokens=5)
    target.step()
    target.step()
    assert [[n for _, n in step] for step in steps] == [[10], [1], [1, 10], [1, 1]]


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_batch": 0},
        {"max_batch": 64, "max_step_tokens": 64},
        {"chunk_tokens": 0},
        {"decode_prefill_tokens": 0},
        {"recompute_max_tokens": -1},
    ],
)
def test_limits_that_make_no_sense_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="want"):
        EngineLimits(**wrong)  # type: ignore[arg-type]
