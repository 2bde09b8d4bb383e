"""The engine's ways of a sequence: prefill, hand-off, cache hits, deaths."""

from __future__ import annotations

import pytest

from pdserve.block_messages import BlockCounts
from pdserve.engine.engine import Engine
from pdserve.engine.events import ChunkDone, RowDied, Sampled, StepDied
from pdserve.engine.fake_rule import EOS_ID, FakeRule, expected_choice
from pdserve.engine.fake_runner import FakeFaults, FakeRunner, InjectedFault
from pdserve.engine.scheduler import EngineLimits
from pdserve.engine.sequence import Sequence, SequenceState
from pdserve.errors import InvariantViolated
from pdserve.sampling import FinishReason
from tests.support.memories import pool_bytes
from tests.support.virtual_clock import VirtualClock
from tests.unit.engine_core.building import (
    assert_at_rest,
    engine,
    fill,
    generated,
    run_out,
    sample_key,
    sequence,
    start_local,
)

PROMPT = list(b"it was a dark and stormy night")  # 30 ids


def test_local_prefill_and_decode() -> None:
    target = engine()
    seq = start_local(target, sequence(PROMPT, 10))
    assert len(seq.block_table) == 8
    events = run_out(target)
    assert generated(seq) == expected_choice(PROMPT, seq.key)
    assert events[0] == ChunkDone(seq, 30)
    sampled = [event for event in events if isinstance(event, Sampled)]
    assert [event.first for event in sampled] == [True] + [False] * 9
    assert [event.finish for event in sampled] == [None] * 9 + [FinishReason.LENGTH]
    assert_at_rest(target)
    assert target.pool.counts().cached == 39 // 4, "the last token's KV was never computed"


def test_prefill_for_another_worker_leaves_with_its_first_token_and_keeps_its_blocks() -> None:
    target = engine(limits=EngineLimits(chunk_tokens=12))
    seq = sequence(PROMPT, 10)
    assert target.reserve_prefill(seq)
    assert len(seq.block_table) == 8
    target.start_prefill(seq, then_decode=False)
    assert target.step() == [ChunkDone(seq, 12)]
    assert target.step() == [ChunkDone(seq, 24)]
    done, sampled = target.step()
    assert done == ChunkDone(seq, 30)
    assert isinstance(sampled, Sampled)
    assert (sampled.first, sampled.finish) == (True, None)
    assert seq.state is SequenceState.LEFT
    assert not target.has_work
    assert target.step() == []
    assert target.pool.counts().owned == 8
    target.end(seq, hold_s=5)
    target.end(seq)
    assert_at_rest(target)
    assert target.pool.counts().cached == 7


def test_all_blocks_of_a_prompt_or_none() -> None:
    target = engine(num_blocks=7)
    seq = sequence(PROMPT)
    assert not target.reserve_prefill(seq)
    assert target.pool.counts().free == 7
    assert seq.state is SequenceState.NEW
    short = sequence(PROMPT[:28])
    assert not target.reserve_prefill(short, then_decode=True)
    assert target.reserve_prefill(short)
    target.end(short)
    assert_at_rest(target)


def hand_off(source: Engine, target: Engine, seq: Sequence) -> Sequence:
    """Prefill seq on one engine and start it on another, its blocks copied by hand; returns the second one's."""
    assert source.reserve_prefill(seq)
    source.start_prefill(seq, then_decode=False)
    while source.has_work:
        source.step()
    other = sequence(seq.ids[:-1], key=seq.key, handle=seq.handle)
    hits = target.find_hits(other)
    num_new = -(-(len(other.ids) + 1) // target.pool.block_size) - len(hits)
    assert target.pool.fits(hits, num_new)
    target.pool.pin(hits)
    granted = target.pool.grant(num_new)
    assert granted is not None
    size = target.runner.layout.block_bytes
    for mine, theirs in zip(granted, seq.block_table[len(hits) :], strict=False):
        pool_bytes(target.runner)[mine * size : (mine + 1) * size] = pool_bytes(source.runner)[
            theirs * size : (theirs + 1) * size
        ]
    target.pool.adopt(granted)
    other.block_table = [*hits, *granted]
    other.num_cached_tokens = len(hits) * target.pool.block_size
    other.ids.append(seq.ids[-1])
    source.end(seq)
    target.start_decode(other)
    return other


def test_hand_off_between_two_engines() -> None:
    source, target = engine(), engine()
    seq = hand_off(source, target, sequence(PROMPT, 10))
    events = run_out(target)
    assert generated(seq) == expected_choice(PROMPT, seq.key)
    assert not any(event.first for event in events if isinstance(event, Sampled))
    assert_at_rest(source)
    assert_at_rest(target)
    again = hand_off(source, target, sequence(PROMPT, 20, handle=2))
    assert again.num_cached_tokens == 28, "all full blocks of the prompt were adopted into the cache"
    run_out(target)
    assert generated(again) == expected_choice(PROMPT, again.key)


def test_a_hand_off_of_a_whole_number_of_blocks() -> None:
    source, target = engine(), engine()
    for handle in (1, 2):
        seq = hand_off(source, target, sequence(PROMPT[:28], 10, handle=handle))
        run_out(target)
        assert generated(seq) == expected_choice(PROMPT[:28], seq.key)
        assert seq.num_cached_tokens == (0, 28)[handle - 1]


def test_a_hand_off_without_its_blocks_is_refused() -> None:
    target = engine()
    with pytest.raises(InvariantViolated):
        target.start_decode(sequence(PROMPT))


def test_hits_leave_a_token_to_compute_in_a_block_of_its_own() -> None:
    target = engine()
    for length, hits in ((28, 24), (29, 28), (30, 28)):
        start_local(target, sequence(PROMPT[:length], 1))
        run_out(target)
        seq = start_local(target, sequence(PROMPT[:length], 6, handle=9))
        assert seq.num_cached_tokens == hits
        run_out(target)
        assert generated(seq) == expected_choice(PROMPT[:length], seq.key)
    load = target.load()
    assert load.num_cache_query_tokens == 2 * (28 + 29 + 30)
    assert load.num_cache_hit_tokens == 24 + 28 + 28 + 24 + 28 + 28 - 24


def test_a_running_sequence_is_found_by_the_next_one() -> None:
    target = engine(limits=EngineLimits(chunk_tokens=8))
    first = start_local(target, sequence(PROMPT))
    target.step()
    second = start_local(target, sequence(PROMPT, handle=2))
    assert second.num_cached_tokens == 8
    assert second.block_table[:2] == first.block_table[:2]
    assert target.pool.counts().owned == 8 + 6
    run_out(target)
    for seq in (first, second):
        assert generated(seq) == expected_choice(PROMPT, seq.key)
    assert_at_rest(target)


def test_salt_and_switches_keep_prefixes_apart() -> None:
    target = engine()
    start_local(target, sequence(PROMPT))
    run_out(target)
    salted = sequence(PROMPT, handle=2)
    salted.cache_salt = "mine"
    assert start_local(target, salted).num_cached_tokens == 0
    proud = sequence(PROMPT, handle=3)
    proud.takes_hits = False
    assert start_local(target, proud).num_cached_tokens == 0
    run_out(target)
    off = engine(limits=EngineLimits(prefix_cache=False))
    start_local(off, sequence(PROMPT))
    run_out(off)
    assert off.pool.counts().free == 64
    assert start_local(off, sequence(PROMPT, handle=2)).num_cached_tokens == 0


def test_the_first_token_may_be_the_last() -> None:
    target = engine(rule=FakeRule(eos_one_in=1))
    seq = start_local(target, sequence(PROMPT))
    finished = target.step()[-1]
    assert finished == Sampled(seq, EOS_ID, None, FinishReason.EOS, True)
    assert not target.has_work
    target.end(seq)
    assert_at_rest(target)


def test_abort_in_every_state() -> None:
    target = engine(num_blocks=12, limits=EngineLimits(chunk_tokens=8))
    new, reserved = sequence(PROMPT), sequence(PROMPT, handle=2)
    assert target.reserve_prefill(reserved)
    target.end(new)
    target.end(reserved)
    prefilling = start_local(target, sequence(PROMPT, handle=3))
    target.step()
    target.end(prefilling)
    assert target.pool.counts().cached == 2, "what was computed is kept"
    running = start_local(target, sequence(PROMPT, 20, handle=4))
    for _ in range(6):
        target.step()
    assert running.state is SequenceState.RUNNING
    target.end(running)
    assert_at_rest(target)
    assert target.step() == []


def test_calls_in_the_wrong_state_are_refused() -> None:
    target = engine()
    seq = sequence(PROMPT)
    with pytest.raises(InvariantViolated, match="new"):
        target.start_prefill(seq, then_decode=True)
    start_local(target, seq)
    with pytest.raises(InvariantViolated, match="prefilling"):
        target.reserve_prefill(seq)
    target.end(seq)
    with pytest.raises(InvariantViolated, match="ended"):
        target.start_decode(seq)


def test_a_row_dies_alone_and_its_kv_is_not_cached() -> None:
    target = engine(faults=FakeFaults(row_token_ids=frozenset([0])), limits=EngineLimits(chunk_tokens=8))
    start_local(target, sequence([*PROMPT[:20]], 1, handle=3))
    run_out(target)
    good = start_local(target, sequence(PROMPT, handle=1))
    bad = start_local(target, sequence([*PROMPT[:20], 0, 1, 2], handle=2))
    events = run_out(target)
    (died,) = [event for event in events if isinstance(event, RowDied)]
    assert died.seq is bad
    assert generated(good) == expected_choice(PROMPT, good.key)
    assert_at_rest(target)
    assert start_local(target, sequence(PROMPT, handle=4)).num_cached_tokens == 0, (
        "its hits are in doubt as well"
    )


@pytest.mark.parametrize("sound", [True, False])
def test_a_step_that_raises_ends_its_batch(sound: bool) -> None:
    faults = FakeFaults(failing_steps=frozenset([3]), sound=sound)
    target = engine(faults=faults, limits=EngineLimits(chunk_tokens=8))
    seqs = [start_local(target, sequence([handle] * 30, handle=handle)) for handle in (1, 2)]
    target.step()
    target.step()
    (died,) = target.step()
    assert isinstance(died, StepDied)
    assert (died.seqs, died.sound) == (tuple(seqs), sound)
    assert isinstance(died.error.__cause__, InjectedFault)
    assert [seq.num_computed for seq in seqs] == [16, 16]
    assert target.num_steps == 3
    for seq in died.seqs:
        target.end(seq)
    assert_at_rest(target)
    assert target.pool.counts() == BlockCounts(free=56, granted=0, owned=0, cached=8, quarantined=0)
    again = start_local(target, sequence([1] * 30, handle=3))
    run_out(target)
    assert generated(again) == expected_choice([1] * 30, again.key)


def test_a_step_failure_spares_those_that_were_not_in_it() -> None:
    faults = FakeFaults(step_token_ids=frozenset([0]))
    target = engine(faults=faults, limits=EngineLimits(decode_prefill_tokens=None))
    struck = start_local(target, sequence([5, 5, 0], handle=1, strikes=1))
    others = [start_local(target, sequence([h] * 5, 12, handle=h)) for h in (2, 3)]
    events = run_out(target)
    (died,) = [event for event in events if isinstance(event, StepDied)]
    assert died.seqs == (struck,)
    for seq in others:
        assert generated(seq) == expected_choice([seq.handle] * 5, seq.key)


def test_a_runner_that_gives_the_wrong_outputs_fails_the_step() -> None:
    class Forgetful(FakeRunner):
        def run(self, rows):  # type: ignore[no-untyped-def]
            return super().run(rows)[:-1]

    target = Engine(Forgetful(num_blocks=8, block_size=4), EngineLimits(), VirtualClock())
    start_local(target, sequence(PROMPT[:5]))
    (died,) = target.step()
    assert isinstance(died, StepDied)
    assert isinstance(died.error.__cause__, InvariantViolated)


def test_same_inputs_same_events() -> None:
    def trace() -> list[str]:
        target = engine(num_blocks=14, limits=EngineLimits(max_batch=3, chunk_tokens=8))
        fill(target, {1: 9, 2: 20, 3: 3, 4: 7}, 14)
        return [f"{type(event).__name__} {getattr(event, 'seq').handle}" for event in run_out(target)]  # noqa: B009

    assert trace() == trace()


def test_load_figures() -> None:
    clock = VirtualClock()
    target = engine(num_blocks=64, limits=EngineLimits(chunk_tokens=8), clock=clock)
    start_local(target, sequence(PROMPT, 4, key=sample_key(4)))
    assert target.load().num_queued_tokens == 30
    assert target.load().prefill_tokens_per_s == 0.0
    for _ in range(3):
        target.step()
        clock.advance(0.5)
    load = target.load()
    assert load.num_running == 1
    assert load.num_queued_tokens == 6
    assert load.prefill_tokens_per_s == pytest.approx(16.0)
    assert load.step_s == pytest.approx(0.5)
    assert load.slowest_step_s == pytest.approx(0.5)


def test_idle_time_after_an_abort_is_no_step_time() -> None:
    clock = VirtualClock()
    target = engine(num_blocks=64, limits=EngineLimits(chunk_tokens=8), clock=clock)
    seq = sequence(PROMPT, 4, key=sample_key(4))
    start_local(target, seq)
    for _ in range(3):
        target.step()
        clock.advance(0.5)
    target.end(seq)  # in the midst of its prefill: nothing follows the last step
    clock.advance(600.0)
    start_local(target, sequence(PROMPT, 5, key=sample_key(4)))
    target.step()
    load = target.load()
    assert load.step_s <= 0.5
    assert load.slowest_step_s <= 0.5
    assert load.prefill_tokens_per_s >= 16.0


def test_a_step_in_which_the_process_stood_still_says_little_about_the_rate() -> None:
    clock = VirtualClock()
    target = engine(num_blocks=64, limits=EngineLimits(chunk_tokens=8), clock=clock)
    start_local(target, sequence(PROMPT * 2, 4, key=sample_key(4)))
    for took_s in (20.0, 0.5, 600.0, 0.5):  # the first one compiles
        target.step()
        clock.advance(took_s)
    target.step()
    load = target.load()
    assert load.prefill_tokens_per_s > 8.0
    assert load.step_s < 1.0
    assert load.slowest_step_s == pytest.approx(600.0), "the watch over hanging engines must know it"
