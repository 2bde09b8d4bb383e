"""Steps that are launched before the last one is read: the same texts, and no block given away while one uses it."""

from __future__ import annotations

import random

import pytest

from pdserve.engine.engine import Engine
from pdserve.engine.events import Sampled, StepDied
from pdserve.engine.fake_rule import FakeRule
from pdserve.engine.fake_runner import FakeRunner
from pdserve.engine.scheduler import EngineLimits
from pdserve.engine.sequence import Sequence
from pdserve.errors import StepFailed
from pdserve.sampling import SamplingParams
from tests.support.launching_runner import LateRunner
from tests.support.virtual_clock import VirtualClock
from tests.unit.engine_core.building import (
    assert_at_rest,
    engine,
    generated,
    run_out,
    sample_key,
    sequence,
    start_local,
    step,
)


def late_engine(
    num_blocks: int = 64, *, eos_one_in: int = 0, max_batch: int = 64
) -> tuple[Engine, LateRunner]:
    rule = FakeRule(eos_one_in=eos_one_in)
    runner = LateRunner(FakeRunner(num_blocks=num_blocks, block_size=4, rule=rule))
    return Engine(runner, EngineLimits(max_batch=max_batch), VirtualClock()), runner


def test_the_next_step_is_launched_before_the_last_one_is_read() -> None:
    target, runner = late_engine()
    seqs = [start_local(target, sequence([handle] * 6, 3, handle=handle)) for handle in (1, 2)]
    run_out(target)
    assert runner.log == [
        "launch 2",
        "collect",  # the prompts
        "launch 2",
        "launch 2 behind",
        "collect",
        "collect",  # both end with it: nothing is behind
    ]
    assert [len(generated(seq)) for seq in seqs] == [3, 3]
    assert_at_rest(target)


def test_one_that_comes_joins_the_step_that_is_launched_next() -> None:
    target, runner = late_engine()
    first = start_local(target, sequence([1] * 6, 20, handle=1))
    for _ in range(4):
        step(target)
    prefilled = sequence([2] * 6, 20, handle=2)
    assert target.reserve_prefill(prefilled)
    target.start_prefill(prefilled, then_decode=False)
    while not prefilled.has_sampled:
        step(target)
    moved = sequence([2] * 6, 20, handle=2)
    moved.ids.append(prefilled.ids[-1])
    moved.block_table = list(prefilled.block_table)
    prefilled.block_table = []
    target.start_decode(moved)
    step(target)
    step(target)
    assert "launch 2 behind" in runner.log
    run_out(target)
    assert [len(generated(seq)) for seq in (first, moved)] == [20, 20]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(repetition_penalty=1.1),
        SamplingParams(presence_penalty=0.1),
        SamplingParams(frequency_penalty=0.1),
    ],
)
def test_what_depends_on_the_last_token_waits_for_it(params: SamplingParams) -> None:
    target, runner = late_engine()
    start_local(target, sequence([1] * 6, 9, key=sample_key(9, params=params)))
    run_out(target)
    assert not any("behind" in line for line in runner.log)


@pytest.mark.parametrize("seed", range(60))
def test_any_life_gives_the_texts_of_an_engine_that_waits(seed: int) -> None:
    """Sequences come, end by themselves, are aborted between steps, lose their blocks; all blocks come back."""
    source = random.Random(seed)
    eos_one_in = source.choice([0, 5, 20])
    target, runner = late_engine(
        source.choice([14, 30, 80]), eos_one_in=eos_one_in, max_batch=source.choice([2, 6])
    )
    alive: list[Sequence] = []
    whole: list[Sequence] = []
    for handle in range(1, 25):
        seq = sequence(
            [source.randrange(200) for _ in range(source.randrange(1, 16))],
            source.randrange(1, 24),
            handle=handle,
        )
        if target.reserve_prefill(seq, then_decode=True):
            target.start_prefill(seq, then_decode=True)
            alive.append(seq)
        for _ in range(source.choice([0, 1, 3, 8])):
            for event in step(target) if target.has_work else []:
                if isinstance(event, Sampled) and event.finish:
                    whole.append(event.seq)
                    alive.remove(event.seq)
        if alive and source.random() < 0.2:
            aborted = alive.pop(source.randrange(len(alive)))
            target.end(aborted)
            assert target.pool.adds_up()
    whole += [event.seq for event in run_out(target) if isinstance(event, Sampled) and event.finish]
    assert_at_rest(target)
    assert runner.in_flight == []
    for seq in whole:
        alone = engine(rule=FakeRule(eos_one_in=eos_one_in))
        want = sequence(seq.ids[: seq.num_prompt_tokens], handle=seq.handle, key=seq.key)
        start_local(alone, want)
        run_out(alone)
        assert generated(seq) == generated(want)


def test_the_blocks_of_one_that_ends_are_its_own_until_the_device_is_done() -> None:
    target, runner = late_engine()
    first = start_local(target, sequence([1] * 6, 20, handle=1))
    start_local(target, sequence([2] * 6, 20, handle=2))
    for _ in range(3):
        step(target)
    assert len(runner.in_flight) == 1
    target.end(first)
    assert runner.in_flight == []
    step(target)
    assert target.has_work


def test_a_step_of_nobody_is_forgotten() -> None:
    target, runner = late_engine()
    seq = start_local(target, sequence([1] * 6, 20, handle=1))
    for _ in range(3):
        step(target)
    target.end(seq)
    assert_at_rest(target)
    assert runner.in_flight == []


def test_what_a_device_reports_while_a_sequence_ends_fails_the_step() -> None:
    target, runner = late_engine()
    first = start_local(target, sequence([1] * 6, 20, handle=1))
    second = start_local(target, sequence([2] * 6, 20, handle=2))
    for _ in range(3):
        step(target)
    runner.fail_next("the device is gone")
    target.end(first)
    (event,) = target.step()
    assert isinstance(event, StepDied)
    assert isinstance(event.error, StepFailed) and "the device is gone" in str(event.error)
    assert event.seqs == (second,)
