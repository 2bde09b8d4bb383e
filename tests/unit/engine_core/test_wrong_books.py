"""A pool whose books disagree: the blocks in doubt are found, and never used again."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pdserve.engine.block_pool import BlockPool, BlockState
from tests.support.virtual_clock import VirtualClock

NUM_BLOCKS = 8
HASH = b"h" * 16


def damaged_count(pool: BlockPool, owned: list[int], granted: list[int], cached: int) -> list[int]:
    pool._counts[BlockState.OWNED] += 1
    return []


def free_and_owned(pool: BlockPool, owned: list[int], granted: list[int], cached: int) -> list[int]:
    pool._free.append(owned[0])
    return [owned[0]]


def free_twice(pool: BlockPool, owned: list[int], granted: list[int], cached: int) -> list[int]:
    pool._free.append(pool._free[0])
    return [pool._free[0]]


def owned_by_nobody(pool: BlockPool, owned: list[int], granted: list[int], cached: int) -> list[int]:
    return pool.allocate(1) or []


def granted_to_nobody(pool: BlockPool, owned: list[int], granted: list[int], cached: int) -> list[int]:
    return pool.grant(1) or []


def owned_without_a_reference(
    pool: BlockPool, owned: list[int], granted: list[int], cached: int
) -> list[int]:
    pool._num_references[owned[1]] = 0
    return [owned[1]]


def cached_but_not_to_be_evicted(
    pool: BlockPool, owned: list[int], granted: list[int], cached: int
) -> list[int]:
    del pool._cached[cached]
    return [cached]


def a_hash_of_two_blocks(pool: BlockPool, owned: list[int], granted: list[int], cached: int) -> list[int]:
    pool._hash_of[owned[0]] = HASH
    return [owned[0]]


@pytest.mark.parametrize(
    "damage",
    [
        damaged_count,
        free_and_owned,
        free_twice,
        owned_by_nobody,
        granted_to_nobody,
        owned_without_a_reference,
        cached_but_not_to_be_evicted,
        a_hash_of_two_blocks,
    ],
    ids=lambda damage: damage.__name__,
)
def test_what_is_in_doubt_is_condemned_and_the_rest_goes_on(
    damage: Callable[[BlockPool, list[int], list[int], int], list[int]],
) -> None:
    clock = VirtualClock()
    pool = BlockPool(NUM_BLOCKS, 16, clock)
    [cached] = pool.allocate(1) or []
    pool.publish(cached, HASH)
    pool.release([cached])
    owned, granted = pool.allocate(2) or [], pool.grant(2) or []
    wrong = damage(pool, owned, granted, cached)
    held = {
        BlockState.OWNED: dict.fromkeys(owned),
        BlockState.GRANTED: dict.fromkeys(granted),
        BlockState.QUARANTINED: {},
    }
    assert pool.condemn(held) == wrong
    assert pool.adds_up() and pool.counts().quarantined == pool.num_condemned == len(wrong)
    clock.advance(3.0)
    assert pool.quarantine_age_s == (3.0 if wrong else 0.0)
    pool.release(owned)  # the condemned ones mean nothing
    pool.free_granted(granted)
    assert pool.adds_up() and pool.available == NUM_BLOCKS - len(wrong)
    assert not set(pool.allocate(pool.available) or []) & set(wrong)


def test_the_age_of_a_quarantine_is_that_of_the_oldest_block() -> None:
    clock = VirtualClock()
    pool = BlockPool(NUM_BLOCKS, 16, clock)
    first, later = pool.grant(2) or [], pool.grant(1) or []
    pool.quarantine_granted(first)
    clock.advance(2.0)
    pool.quarantine_granted(later)
    clock.advance(1.0)
    assert pool.quarantine_age_s == 3.0
    pool.release_quarantined(first)
    assert pool.quarantine_age_s == 1.0
    pool.release_quarantined(later)
    assert pool.quarantine_age_s == 0.0
