"""When the pool is out of blocks: who is preempted, who waits, who comes back first."""

from __future__ import annotations

from pdserve.engine.events import HandedBackSeq, Preempted, Sampled
from pdserve.engine.fake_rule import expected_choice
from pdserve.engine.scheduler import EngineLimits
from pdserve.engine.sequence import SequenceState
from tests.support.virtual_clock import VirtualClock
from tests.unit.engine_core.building import (
    assert_at_rest,
    can_run,
    engine,
    fill,
    generated,
    run_out,
    sample_key,
    sequence,
    start_local,
    state_of,
    step,
)


def test_the_youngest_is_preempted_and_its_text_does_not_show_it() -> None:
    target = engine(num_blocks=8)
    old, young = fill(target, {1: 9, 2: 9}, 20)
    events = run_out(target)
    taken = [event for event in events if isinstance(event, Preempted)]
    assert taken
    assert {id(event.seq) for event in taken} == {id(young)}
    for seq in (old, young):
        assert generated(seq) == expected_choice([seq.handle] * 9, seq.key)
    finished = [event.seq for event in events if isinstance(event, Sampled) and event.finish]
    assert finished == [old, young]
    firsts = [event.seq for event in events if isinstance(event, Sampled) and event.first]
    assert firsts == [old, young], "a recomputed prompt gives no second first token"
    assert_at_rest(target)


def test_age_is_the_first_admission_and_is_kept() -> None:
    clock = VirtualClock()
    target = engine(num_blocks=8, clock=clock)
    old, young = fill(target, {1: 9, 2: 9}, 20)
    admitted = (old.admitted_s, young.admitted_s)
    clock.advance(3)
    run_out(target)
    assert (old.admitted_s, young.admitted_s) == admitted


def test_an_owner_may_give_an_age() -> None:
    target = engine(num_blocks=8)
    late = sequence([1] * 9, 20, handle=1)
    late.admitted_s = 5_000.0
    start_local(target, late)
    start_local(target, sequence([2] * 9, 20, handle=2))
    taken = [event for event in run_out(target) if isinstance(event, Preempted)]
    assert {event.seq.handle for event in taken} == {1}


def test_preempted_ones_come_back_before_anything_new_and_only_with_room_for_all() -> None:
    target = engine(num_blocks=8)
    old, young = fill(target, {1: 9, 2: 9}, 12)
    while state_of(young) is not SequenceState.PREEMPTED:
        step(target)
    assert not target.reserve_prefill(sequence([3], handle=3)), "nothing new while a victim waits"
    assert target.num_preempted == 1
    while state_of(old) is SequenceState.RUNNING:
        need = -(-(len(young.ids) + 1) // 4)
        assert target.pool.available < need + 1, "or it would be back"
        step(target)
    step(target)
    assert state_of(young) is SequenceState.RUNNING
    run_out(target)
    assert generated(young) == expected_choice([2] * 9, young.key)


def test_a_victim_waits_until_the_others_could_grow_too() -> None:
    target = engine(num_blocks=10, limits=EngineLimits(prefix_cache=False))
    old, young = fill(target, {1: 10, 2: 11}, 29)
    while state_of(young) is not SequenceState.PREEMPTED:
        step(target)
    need = -(-(len(young.ids) + 1) // 4)
    target.end(old)
    bound = target.pool.allocate(target.pool.available - need)
    assert bound is not None
    assert can_run(target), "nobody runs, so its need is enough"
    target.pool.release(bound)
    small = sequence([3], handle=3)
    small.block_table = target.pool.allocate(1) or []
    small.ids.append(4)
    target.start_decode(small)
    bound = target.pool.allocate(target.pool.available - need)
    assert bound is not None
    step(target)
    assert state_of(young) is SequenceState.PREEMPTED, "the one that runs could not grow"
    target.pool.release(bound[:1])
    step(target)
    assert state_of(young) is not SequenceState.PREEMPTED
    target.pool.release(bound[1:])
    run_out(target)
    assert generated(young) == expected_choice([2] * 11, young.key)


def test_a_long_victim_is_handed_back() -> None:
    target = engine(num_blocks=8, limits=EngineLimits(recompute_max_tokens=10))
    old, young = fill(target, {1: 9, 2: 9}, 20)
    events = run_out(target)
    (back,) = [event for event in events if isinstance(event, HandedBackSeq)]
    assert back.seq is young
    assert young.block_table == []
    assert generated(old) == expected_choice([1] * 9, old.key)
    assert_at_rest(target)


def test_a_sequence_waits_for_blocks_that_others_hold() -> None:
    target = engine(num_blocks=4)
    granted = target.pool.grant(1)
    assert granted is not None
    (seq,) = fill(target, {1: 9}, 6)
    events = run_out(target)
    assert isinstance(events[-1], Preempted)
    assert not can_run(target), "it can't run, so nobody need call step"
    target.pool.free_granted(granted)
    assert can_run(target)
    run_out(target)
    assert generated(seq) == expected_choice([1] * 9, seq.key)
    assert_at_rest(target)


def test_what_is_prefilled_for_another_worker_is_not_preempted() -> None:
    target = engine(num_blocks=7, limits=EngineLimits(chunk_tokens=4, decode_prefill_tokens=4))
    (seq,) = fill(target, {1: 9}, 20)
    for _ in range(3):
        target.step()
    other = sequence([2] * 13, handle=2)
    assert target.reserve_prefill(other)
    target.start_prefill(other, then_decode=False)
    events = [event for _ in range(6) for event in target.step()]
    assert [event.seq for event in events if isinstance(event, Preempted)] == [seq]
    assert other.state is SequenceState.LEFT
    target.end(other)
    run_out(target)
    assert generated(seq) == expected_choice([1] * 9, seq.key)


def test_a_window_is_the_smaller_of_model_and_pool() -> None:
    assert engine(num_blocks=8).window_tokens == 32
    assert engine(num_blocks=8000).window_tokens == 8192
    target = engine(num_blocks=8)
    seq = start_local(target, sequence([1] * 12, 20))
    run_out(target)
    assert len(seq.ids) == 32


# --- deaths


def test_one_that_lost_its_blocks_does_not_come_back_in_the_same_step() -> None:
    """It shares a beginning with who takes its turn, so that it would fit at once where its last block didn't."""
    limits = EngineLimits(
        max_step_tokens=4,
        max_batch=1,
        chunk_tokens=4,
        decode_prefill_tokens=1,
        recompute_max_tokens=None,
    )
    target = engine(num_blocks=9, block_size=3, limits=limits)
    struck = sequence([65] * 6 + [66] * 9 + [65] * 2, 1, handle=1, strikes=1)
    assert target.reserve_prefill(struck)
    target.start_prefill(struck, then_decode=False)
    start_local(target, sequence([65] * 4, 4, handle=2, key=sample_key(4, seed=0)))
    granted = target.pool.grant(1)
    assert granted is not None
    taken: list[Preempted] = []
    for _ in range(30):
        events = step(target)
        for event in events:
            if isinstance(event, Preempted):
                taken.append(event)
                assert event.seq.state is SequenceState.PREEMPTED and event.seq.block_table == []
    assert taken, "or this shows nothing"
    target.pool.free_granted(granted)
    run_out(target)
    assert_at_rest(target)
