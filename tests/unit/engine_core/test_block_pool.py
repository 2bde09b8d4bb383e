"""The block pool's state machine, its eviction order and its events."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pdserve.block_messages import BlockCounts
from pdserve.engine.block_pool import BlockPool, BlockState
from pdserve.errors import InvariantViolated
from tests.support.virtual_clock import VirtualClock


def pool_of(num_blocks: int, clock: VirtualClock | None = None) -> BlockPool:
    return BlockPool(num_blocks, 4, clock or VirtualClock())


def take(pool: BlockPool, num_blocks: int) -> list[int]:
    blocks = pool.allocate(num_blocks)
    assert blocks is not None
    return blocks


def grant(pool: BlockPool, num_blocks: int) -> list[int]:
    blocks = pool.grant(num_blocks)
    assert blocks is not None
    return blocks


def cache(pool: BlockPool, *hashes: bytes, hold_until_s: float | None = None) -> list[int]:
    """Own, publish and release one block a hash, as one chain."""
    blocks = take(pool, len(hashes))
    for block_id, block_hash in zip(blocks, hashes, strict=True):
        pool.publish(block_id, block_hash)
    pool.release(blocks, hold_until_s=hold_until_s)
    return blocks


def test_allocate_is_all_or_nothing() -> None:
    pool = pool_of(3)
    assert pool.allocate(4) is None
    assert pool.counts() == BlockCounts(3, 0, 0, 0, 0)
    assert take(pool, 3) == [0, 1, 2]
    assert pool.allocate(1) is None
    assert pool.allocate(0) == []


def test_released_blocks_are_free_or_cached() -> None:
    pool = pool_of(3)
    blocks = take(pool, 2)
    pool.publish(blocks[0], b"a")
    pool.release(blocks)
    assert pool.counts() == BlockCounts(free=2, granted=0, owned=0, cached=1, quarantined=0)
    assert pool.match([b"a", b"b"]) == [blocks[0]]


def test_match_stops_at_the_first_miss() -> None:
    pool = pool_of(4)
    a, c = cache(pool, b"a", b"c")
    assert pool.match([b"a", b"b", b"c"]) == [a]
    assert pool.match([b"b", b"a"]) == []
    assert pool.match([b"a", b"c"]) == [a, c]


def test_a_shared_block_is_counted_once_and_lives_as_long_as_its_last_user() -> None:
    pool = pool_of(2)
    (block_id,) = cache(pool, b"a")
    pool.pin([block_id])
    pool.pin([block_id])
    assert pool.counts() == BlockCounts(free=1, granted=0, owned=1, cached=0, quarantined=0)
    assert pool.num_references(block_id) == 2
    pool.release([block_id])
    assert pool.state(block_id) is BlockState.OWNED
    pool.release([block_id])
    assert pool.state(block_id) is BlockState.CACHED


def test_pinned_hits_are_never_evicted() -> None:
    pool = pool_of(3)
    a, _b = cache(pool, b"a", b"b")
    pool.pin([a])
    assert take(pool, 2)
    assert pool.match([b"a"]) == [a]
    assert pool.allocate(1) is None


def test_eviction_goes_by_release_and_takes_tails_first() -> None:
    pool = pool_of(4)
    cache(pool, b"a0", b"a1")
    cache(pool, b"b0", b"b1")
    pool.take_events()
    gone = []
    for _ in range(4):
        take(pool, 1)
        gone += [h for what, h in pool.take_events() if what == "removed"]
    assert gone == [b"a1", b"a0", b"b1", b"b0"]


def test_use_makes_young_again() -> None:
    pool = pool_of(2)
    (a,) = cache(pool, b"a")
    cache(pool, b"b")
    pool.pin([a])
    pool.release([a])
    take(pool, 1)
    assert pool.hashes() == [b"a"]


def test_held_blocks_are_evicted_last_but_are_evicted() -> None:
    clock = VirtualClock()
    pool = pool_of(3, clock)
    cache(pool, b"held0", b"held1", hold_until_s=clock.now_s() + 5)
    cache(pool, b"plain")
    assert pool.available == 3
    take(pool, 1)
    assert pool.match([b"plain"]) == []
    take(pool, 1)
    assert pool.match([b"held0", b"held1"]) == pool.match([b"held0"]) != []
    take(pool, 1)
    assert pool.hashes() == []


def test_a_hold_that_ends_is_a_release() -> None:
    clock = VirtualClock()
    pool = pool_of(3, clock)
    cache(pool, b"held", hold_until_s=clock.now_s() + 5)
    cache(pool, b"before")
    clock.advance(5)
    cache(pool, b"after")
    take(pool, 1)
    assert pool.hashes() == [b"held", b"after"]
    take(pool, 1)
    assert pool.hashes() == [b"after"]


def test_a_hold_that_was_over_before_its_time_is_not_taken_for_a_new_one() -> None:
    clock = VirtualClock()
    pool = pool_of(2, clock)
    (a,) = cache(pool, b"a", hold_until_s=clock.now_s() + 1)
    pool.pin([a])
    pool.release([a], hold_until_s=clock.now_s() + 10)
    clock.advance(2)
    cache(pool, b"plain")
    take(pool, 1)
    assert pool.hashes() == [b"a"]


def test_a_known_hash_stays_with_the_older_block() -> None:
    pool = pool_of(3)
    old, new = take(pool, 2)
    pool.publish(old, b"a")
    pool.publish(new, b"a")
    pool.publish(old, b"a")
    assert pool.match([b"a"]) == [old]
    pool.release([new])
    assert pool.state(new) is BlockState.FREE
    assert pool.match([b"a"]) == [old]
    with pytest.raises(InvariantViolated):
        pool.publish(old, b"b")


def test_forgotten_blocks_stay_with_their_users_and_are_free_after_them() -> None:
    pool = pool_of(2)
    (block_id,) = take(pool, 1)
    pool.publish(block_id, b"a")
    pool.forget([block_id])
    assert pool.match([b"a"]) == []
    assert pool.state(block_id) is BlockState.OWNED
    pool.release([block_id])
    assert pool.counts().free == 2


def test_a_grant_takes_free_blocks_first_then_evicts() -> None:
    pool = pool_of(4)
    cache(pool, b"a", b"b")
    assert pool.grant(5) is None
    assert len(grant(pool, 2)) == 2
    assert pool.counts() == BlockCounts(free=0, granted=2, owned=0, cached=2, quarantined=0)
    assert pool.match([b"a", b"b"])
    assert pool.grant(3) is None
    grant(pool, 2)
    assert pool.counts() == BlockCounts(free=0, granted=4, owned=0, cached=0, quarantined=0)
    assert pool.hashes() == []


def test_granted_blocks_end_in_every_way() -> None:
    pool = pool_of(3)
    adopted, freed, quarantined = grant(pool, 3)
    pool.adopt([adopted])
    pool.free_granted([freed])
    pool.quarantine_granted([quarantined])
    assert pool.counts() == BlockCounts(free=1, granted=0, owned=1, cached=0, quarantined=1)
    pool.release_quarantined([quarantined])
    pool.publish(adopted, b"a")
    pool.release([adopted])
    assert pool.counts() == BlockCounts(free=2, granted=0, owned=0, cached=1, quarantined=0)


ILLEGAL: list[tuple[str, Callable[[BlockPool, int], object], set[BlockState]]] = [
    ("pin", lambda pool, block: pool.pin([block]), {BlockState.OWNED, BlockState.CACHED}),
    ("publish", lambda pool, block: pool.publish(block, b"new"), {BlockState.OWNED}),
    ("forget", lambda pool, block: pool.forget([block]), {BlockState.OWNED}),
    ("release", lambda pool, block: pool.release([block]), {BlockState.OWNED}),
    ("adopt", lambda pool, block: pool.adopt([block]), {BlockState.GRANTED}),
    ("free_granted", lambda pool, block: pool.free_granted([block]), {BlockState.GRANTED}),
    ("quarantine_granted", lambda pool, block: pool.quarantine_granted([block]), {BlockState.GRANTED}),
    ("release_quarantined", lambda pool, block: pool.release_quarantined([block]), {BlockState.QUARANTINED}),
]


def in_state(state: BlockState) -> tuple[BlockPool, int]:
    pool = pool_of(1)
    if state is BlockState.CACHED:
        return pool, cache(pool, b"a")[0]
    if state is BlockState.OWNED:
        return pool, take(pool, 1)[0]
    if state is BlockState.FREE:
        return pool, 0
    (block_id,) = grant(pool, 1)
    if state is BlockState.QUARANTINED:
        pool.quarantine_granted([block_id])
    return pool, block_id


@pytest.mark.parametrize("state", list(BlockState))
@pytest.mark.parametrize(("name", "move", "legal"), ILLEGAL)
def test_every_move_from_every_state(
    name: str, move: Callable[[BlockPool, int], object], legal: set[BlockState], state: BlockState
) -> None:
    pool, block_id = in_state(state)
    if state in legal:
        move(pool, block_id)
    else:
        before = pool.counts()
        with pytest.raises(InvariantViolated, match=name):
            move(pool, block_id)
        assert pool.counts() == before
        assert pool.state(block_id) is state
    assert pool.adds_up()


def test_illegal_amounts() -> None:
    pool = pool_of(2)
    blocks = take(pool, 1)
    with pytest.raises(InvariantViolated):
        pool.release([*blocks, *blocks])
    with pytest.raises(InvariantViolated):
        BlockPool(0, 4, VirtualClock())


def test_a_move_of_many_fails_whole() -> None:
    pool = pool_of(2)
    blocks = take(pool, 1)
    with pytest.raises(InvariantViolated):
        pool.release([*blocks, 1])
    assert pool.state(blocks[0]) is BlockState.OWNED


def test_events_tell_the_net_change() -> None:
    pool = pool_of(2)
    cache(pool, b"a", b"b")
    assert pool.take_events() == [("stored", b"a"), ("stored", b"b")]
    assert pool.take_events() == []
    cache(pool, b"c", b"d")
    assert pool.take_events() == [("removed", b"b"), ("removed", b"a"), ("stored", b"c"), ("stored", b"d")]
    cache(pool, b"e", b"f")
    cache(pool, b"c", b"d")
    assert pool.take_events() == [], "e and f came and went, c and d went and came"
    assert sorted(pool.hashes()) == [b"c", b"d"]
