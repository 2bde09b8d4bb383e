"""What a worker tells a router of its prefix cache is what the cache holds, however late it is taken."""

from __future__ import annotations

import random
from collections.abc import Callable

from pdserve.block_messages import BlockEvents
from pdserve.worker.cache_feed import CacheFeed, Source
from router.prefix_index import PrefixIndex

A, B, C, D = (bytes([n]) * 16 for n in range(4))


class Reading:
    """The session of a router that takes what it is told when the test says so."""

    def __init__(self, feed: CacheFeed, num_blocks: int = 100_000) -> None:
        self.index = PrefixIndex(num_blocks)
        self.num_wakes = 0
        self.taken: list[BlockEvents] = []
        self._source: Source
        feed.open(1, self.when_idle)

    def when_idle(self, source: Source) -> Callable[[], None]:
        self._source = source
        return self.wake

    def wake(self) -> None:
        self.num_wakes += 1

    def take(self) -> BlockEvents | None:
        events = self._source()
        if events is not None:
            self.index.told(events)
        return events

    def take_all(self) -> list[BlockEvents]:
        found = []
        while (events := self.take()) is not None:
            found.append(events)
        return found


def hashes(count: int) -> tuple[bytes, ...]:
    return tuple(n.to_bytes(16, "big") for n in range(count))


def test_a_router_is_told_the_whole_set_and_then_the_changes() -> None:
    feed = CacheFeed()
    feed.change([(True, A), (True, B)])
    router = Reading(feed)
    [whole] = router.take_all()
    assert whole.whole and set(whole.stored) == {A, B} and not whole.removed
    feed.change([(True, C), (True, D), (False, A)])
    assert router.num_wakes == 1
    [change] = router.take_all()
    assert not change.whole and set(change.stored) == {C, D} and change.removed == (A,)
    assert router.index.holds_exactly([B, C, D])
    feed.close(1)
    feed.close(1)
    feed.change([(True, A)])
    assert router.num_wakes == 1 and router.take() is None


def test_an_empty_cache_is_told_too() -> None:
    router = Reading(CacheFeed())
    assert router.take_all() == [BlockEvents(whole=True, stored=(), removed=())]
    assert router.index.is_told


def test_big_sets_come_in_parts() -> None:
    feed = CacheFeed()
    feed.change([(True, each) for each in hashes(2500)])
    parts = Reading(feed).take_all()
    assert [(len(part.stored), part.whole) for part in parts] == [(1024, True), (1024, False), (452, False)]


def test_a_hash_is_told_as_it_stands_when_its_turn_comes() -> None:
    feed = CacheFeed()
    router = Reading(feed)
    router.take_all()
    for stored in (True, False, True, False):
        feed.change([(stored, A)])
    feed.change([(False, B), (True, B)])
    assert router.take_all() == [BlockEvents(whole=False, stored=(B,), removed=(A,))]


def test_a_router_that_lags_is_told_the_whole_set_again() -> None:
    feed = CacheFeed(max_removed=10)
    router = Reading(feed)
    router.take_all()
    for each in hashes(30):
        feed.change([(True, each)])
        if each != hashes(30)[-1]:
            feed.change([(False, each)])
    told = router.take_all()
    assert told[0].whole and sum(len(each.stored) + len(each.removed) for each in told) <= 12
    assert router.index.holds_exactly([hashes(30)[-1]])


def test_whatever_it_takes_and_when_it_never_holds_more_than_the_worker_has_and_ends_with_the_same() -> None:
    """Of a pool of 3,000 blocks, in which new ones push out old ones; the router takes now and then."""
    source = random.Random(5)
    feed, held, num_blocks = CacheFeed(max_removed=2_000), dict[bytes, None](), 3_000
    router = Reading(feed, num_blocks=10**9)
    for number in range(400):
        changes: list[tuple[bool, bytes]] = []
        for index in range(source.randrange(60)):
            if len(held) == num_blocks or (held and source.random() < 0.3):
                gone = source.choice(tuple(held)[:50])
                del held[gone]
                changes.append((False, gone))
            block_hash = (number * 100 + index if source.random() < 0.8 else index).to_bytes(16, "big")
            if block_hash not in held:
                held[block_hash] = None
                changes.append((True, block_hash))
        feed.change(changes)
        if source.random() < 0.02:
            while router.take() is not None and source.random() < 0.7:
                assert len(router.index) <= num_blocks
    router.take_all()
    assert router.index.holds_exactly(held)
