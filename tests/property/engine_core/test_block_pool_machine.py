"""Any legal sequence of calls leaves the block pool as a plain model of it says; illegal ones change nothing."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pdserve.block_messages import BlockCounts
from pdserve.engine.block_pool import BlockPool, BlockState
from pdserve.errors import InvariantViolated
from tests.support.virtual_clock import VirtualClock

COUNT = st.integers(0, 4)
PICK = st.integers(0, 10_000)
HASH = st.integers(0, 12).map(lambda n: bytes([n]) * 16)


class PoolMachine(RuleBasedStateMachine):
    """Holdings are lists of blocks that took a reference each, as block tables do."""

    @initialize(num_blocks=st.integers(1, 12))
    def build(self, num_blocks: int) -> None:
        self.clock = VirtualClock()
        self.pool = BlockPool(num_blocks, 4, self.clock)
        self.num_blocks = num_blocks
        self.holdings: list[list[int]] = []
        self.granted: list[list[int]] = []
        self.quarantined: list[list[int]] = []
        self.hash_of: dict[int, bytes] = {}
        self.evictable: list[int] = []  # next victim first
        self.held: list[tuple[int, float]] = []  # in order of release
        self.told: set[bytes] = set()

    # --- the model

    def references(self) -> dict[int, int]:
        counted: dict[int, int] = {}
        for block_id in (b for holding in self.holdings for b in holding):
            counted[block_id] = counted.get(block_id, 0) + 1
        return counted

    def num_free(self) -> int:
        used = len(self.references()) + sum(map(len, self.granted)) + sum(map(len, self.quarantined))
        return self.num_blocks - used - len(self.evictable) - len(self.held)

    def num_available(self) -> int:
        return self.num_free() + len(self.evictable) + len(self.held)

    def expect_taken(self, num_blocks: int) -> list[int]:
        """The cached blocks that go when so many are taken."""
        num_evicted = max(0, num_blocks - self.num_free())
        order = [*self.evictable, *(block_id for block_id, _ in self.held)]
        gone = order[:num_evicted]
        self.evictable = [b for b in self.evictable if b not in gone]
        self.held = [(b, until) for b, until in self.held if b not in gone]
        for block_id in gone:
            del self.hash_of[block_id]
        return gone

    def owned(self) -> list[int]:
        return list(self.references())

    # --- calls

    @rule(n=COUNT)
    def allocate(self, n: int) -> None:
        fits = n <= self.num_available()
        blocks = self.pool.allocate(n)
        assert (blocks is not None) == fits
        if blocks is not None:
            gone = self.expect_taken(n)
            assert set(gone) <= set(blocks)
            self.holdings.append(blocks)

    @rule(pick=PICK, block_hash=HASH)
    @precondition(lambda self: self.owned())
    def publish(self, pick: int, block_hash: bytes) -> None:
        block_id = self.owned()[pick % len(self.owned())]
        if self.hash_of.get(block_id, block_hash) != block_hash:
            with pytest.raises(InvariantViolated):
                self.pool.publish(block_id, block_hash)
            return
        self.pool.publish(block_id, block_hash)
        if block_hash not in self.hash_of.values():
            self.hash_of[block_id] = block_hash

    @rule(pick=PICK)
    @precondition(lambda self: self.holdings)
    def forget(self, pick: int) -> None:
        holding = self.holdings[pick % len(self.holdings)]
        self.pool.forget(holding)
        for block_id in holding:
            self.hash_of.pop(block_id, None)

    @rule(hashes=st.lists(HASH, max_size=4, unique=True), num_new=COUNT)
    def pin_hits(self, hashes: list[bytes], num_new: int) -> None:
        hits = self.pool.match(hashes)
        by_hash = {h: b for b, h in self.hash_of.items()}
        expected = []
        for block_hash in hashes:
            if block_hash not in by_hash:
                break
            expected.append(by_hash[block_hash])
        assert hits == expected
        lost = sum(1 for b in hits if b in self.evictable or b in dict(self.held))
        fits = num_new + lost <= self.num_available()
        assert self.pool.fits(hits, num_new) == fits
        if not fits:
            return
        self.pool.pin(hits)
        self.evictable = [b for b in self.evictable if b not in hits]
        self.held = [(b, until) for b, until in self.held if b not in hits]
        self.holdings.append(hits)

    @rule(pick=PICK, hold_s=st.sampled_from([None, None, 1.0, 5.0]))
    @precondition(lambda self: self.holdings)
    def release(self, pick: int, hold_s: float | None) -> None:
        holding = self.holdings.pop(pick % len(self.holdings))
        until_s = None if hold_s is None else self.clock.now_s() + hold_s
        self.pool.release(holding, hold_until_s=until_s)
        for block_id in reversed(holding):
            if block_id in self.references() or block_id not in self.hash_of:
                continue
            if until_s is None:
                self.evictable.append(block_id)
            else:
                self.held.append((block_id, until_s))

    @rule(n=COUNT)
    def grant(self, n: int) -> None:
        fits = n <= self.num_available()
        blocks = self.pool.grant(n)
        assert (blocks is not None) == fits
        if blocks is not None:
            assert set(self.expect_taken(n)) <= set(blocks)
            self.granted.append(blocks)

    @rule(pick=PICK, end=st.sampled_from(["adopt", "free", "quarantine"]))
    @precondition(lambda self: self.granted)
    def end_grant(self, pick: int, end: str) -> None:
        blocks = self.granted.pop(pick % len(self.granted))
        if end == "adopt":
            self.pool.adopt(blocks)
            self.holdings.append(blocks)
        elif end == "free":
            self.pool.free_granted(blocks)
        else:
            self.pool.quarantine_granted(blocks)
            self.quarantined.append(blocks)

    @rule(pick=PICK)
    @precondition(lambda self: self.quarantined)
    def end_quarantine(self, pick: int) -> None:
        self.pool.release_quarantined(self.quarantined.pop(pick % len(self.quarantined)))

    @rule(by_s=st.sampled_from([0.5, 2.0]))
    def wait(self, by_s: float) -> None:
        self.clock.advance(by_s)
        over = sorted(
            (entry for entry in self.held if entry[1] <= self.clock.now_s()), key=lambda entry: entry[1]
        )
        self.held = [entry for entry in self.held if entry[1] > self.clock.now_s()]
        self.evictable += [block_id for block_id, _ in over]

    @rule()
    def read_events(self) -> None:
        for what, block_hash in self.pool.take_events():
            assert (block_hash in self.told) == (what == "removed")
            self.told ^= {block_hash}
        assert self.told == set(self.pool.hashes())

    @rule(
        block=PICK, move=st.sampled_from(["pin", "release", "adopt", "free_granted", "release_quarantined"])
    )
    def illegal(self, block: int, move: str) -> None:
        block_id = block % self.num_blocks
        legal = {
            "pin": (BlockState.OWNED, BlockState.CACHED),
            "release": (BlockState.OWNED,),
            "adopt": (BlockState.GRANTED,),
            "free_granted": (BlockState.GRANTED,),
            "release_quarantined": (BlockState.QUARANTINED,),
        }[move]
        if self.pool.state(block_id) not in legal:
            with pytest.raises(InvariantViolated):
                getattr(self.pool, move)([block_id])

    # --- what always holds

    @invariant()
    def books_agree(self) -> None:
        references = self.references()
        assert self.pool.adds_up()
        assert self.pool.counts() == BlockCounts(
            free=self.num_free(),
            granted=sum(map(len, self.granted)),
            owned=len(references),
            cached=len(self.evictable) + len(self.held),
            quarantined=sum(map(len, self.quarantined)),
        )
        assert self.pool.available == self.num_available() >= 0
        for block_id in range(self.num_blocks):
            assert self.pool.num_references(block_id) == references.get(block_id, 0)
        assert sorted(self.pool.hashes()) == sorted(self.hash_of.values())


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPoolMachine = PoolMachine.TestCase
