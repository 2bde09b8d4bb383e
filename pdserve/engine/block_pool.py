"""Who may use which KV block: the state machine of the pool, and its prefix cache.

    FREE ──allocate──► OWNED ──release, published──► CACHED ──evicted──► FREE
      │                 │  ▲ ◄────────pin─────────────┘
      │                 │  └─adopt──┐      └─release, not published──► FREE
      └─────grant─────► GRANTED ────┘
                          ├─free_granted──► FREE
                          └─quarantine_granted──► QUARANTINED ──release_quarantined──► FREE

    any ──condemn──► QUARANTINED, for good

grant and allocate take FREE blocks first and then evict CACHED ones. Every other move raises InvariantViolated and
leaves the pool as it was. Nothing here touches KV bytes.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Container, Mapping, Sequence
from enum import IntEnum
from typing import Literal

from pdserve.block_messages import BlockCounts
from pdserve.clock import Clock
from pdserve.errors import InvariantViolated


class BlockState(IntEnum):
    """The five states; their counts add up to the pool."""

    FREE = 0
    GRANTED = 1
    OWNED = 2
    CACHED = 3
    QUARANTINED = 4


CacheChange = tuple[Literal["stored", "removed"], bytes]


class BlockPool:
    """States, references and hashes of num_blocks blocks. Engine owner only; counts are O(1) after every call."""

    def __init__(self, num_blocks: int, block_size: int, clock: Clock) -> None:
        if num_blocks < 1 or block_size < 1:
            raise InvariantViolated("an empty pool", num_blocks=num_blocks, block_size=block_size)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._clock = clock
        self._state = [BlockState.FREE] * num_blocks
        self._num_references = [0] * num_blocks
        self._counts = [num_blocks, 0, 0, 0, 0]
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: the block freed last is warm
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        # CACHED blocks, in the order in which they are evicted: first _cached, then _held.
        # (OrderedDict: taking the first of a plain dict again and again is quadratic.)
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._held: OrderedDict[int, int] = OrderedDict()  # block -> serial of its hold
        self._hold_ends: list[tuple[float, int, int]] = []  # heap of (until_s, serial, block); some are dead
        self._num_holds = 0
        self._changes: dict[bytes, bool] = {}
        self._condemned: dict[int, None] = {}
        self._quarantined_s: dict[int, float] = {}  # since when, oldest first

    # --- what there is

    def counts(self) -> BlockCounts:
        """How many are in each state. O(1)."""
        return BlockCounts(*self._counts)

    @property
    def available(self) -> int:
        """Blocks that may still be allocated or granted: FREE or CACHED ones. O(1)."""
        return self._counts[BlockState.FREE] + self._counts[BlockState.CACHED]

    def adds_up(self) -> bool:
        """Whether the books agree with each other; False is a bug or memory damage. O(1)."""
        free, granted, owned, cached, quarantined = self._counts
        return (
            free + granted + owned + cached + quarantined == self.num_blocks
            and min(self._counts) >= 0
            and len(self._free) == free
            and len(self._cached) + len(self._held) == cached
            and len(self._hash_of) == len(self._block_of)
        )

    @property
    def quarantine_age_s(self) -> float:
        """Since when the block is QUARANTINED that has been so longest; 0: there is none. O(1)."""
        since_s = next(iter(self._quarantined_s.values()), None)
        return 0.0 if since_s is None else self._clock.now_s() - since_s

    @property
    def num_condemned(self) -> int:
        """Of the QUARANTINED blocks those that will never be used again."""
        return len(self._condemned)

    def state(self, block_id: int) -> BlockState:
        return self._state[block_id]

    def num_references(self, block_id: int) -> int:
        """Sequences and leases that use an OWNED block; 0 in every other state."""
        return self._num_references[block_id]

    def fits(self, hits: Sequence[int], num_new: int) -> bool:
        """Whether num_new blocks would still be available after pinning `hits`; changes nothing."""
        num_evictable = sum(1 for block_id in hits if self._state[block_id] is BlockState.CACHED)
        return num_new <= self.available - num_evictable

    # --- prefix cache

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """The blocks of the leading hashes that are here (OWNED or CACHED). Pin them before anything else runs."""
        found: list[int] = []
        for block_hash in hashes:
            block_id = self._block_of.get(block_hash)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def pin(self, block_ids: Sequence[int]) -> None:
        """Take a reference on blocks that hold KV: CACHED → OWNED, or one reference more on OWNED ones.

        Doesn't ask `available`: ask `fits` first, or let the `grant` or `allocate` that follows say no.
        """
        for block_id in block_ids:
            if self._state[block_id] not in (BlockState.OWNED, BlockState.CACHED):
                raise self._illegal("pin", block_id)
        for block_id in block_ids:
            if self._state[block_id] is BlockState.CACHED:
                if block_id in self._cached:
                    del self._cached[block_id]
                else:
                    del self._held[block_id]
                self._move(block_id, BlockState.OWNED)
            self._num_references[block_id] += 1

    def publish(self, block_id: int, block_hash: bytes) -> None:
        """Make a full OWNED block findable. If the hash is known already, the older block keeps it."""
        if self._state[block_id] is not BlockState.OWNED:
            raise self._illegal("publish", block_id)
        known = self._hash_of.get(block_id)
        if known is not None and known != block_hash:
            raise InvariantViolated(
                "a block can't change its hash", block=block_id, old=known.hex(), new=block_hash.hex()
            )
        if block_hash in self._block_of:
            return
        self._block_of[block_hash] = block_id
        self._hash_of[block_id] = block_hash
        self._note(block_hash, stored=True)

    def forget(self, block_ids: Sequence[int]) -> None:
        """Make OWNED blocks unfindable, as their KV is in doubt; who has them keeps them. Unknown ones are skipped."""
        for block_id in self._sound(block_ids):
            if self._state[block_id] is not BlockState.OWNED:
                raise self._illegal("forget", block_id)
            self._unpublish(block_id)

    def take_events(self) -> list[CacheChange]:
        """What the set of hashes gained and lost since the last call; what came and went in between isn't told.

        At most 2 × num_blocks entries, however long nobody asks.
        """
        changes: list[CacheChange] = [
            ("stored" if stored else "removed", h) for h, stored in self._changes.items()
        ]
        self._changes.clear()
        return changes

    def hashes(self) -> list[bytes]:
        """All hashes that can be found now, oldest publication first: for snapshots."""
        return list(self._block_of)

    # --- owned blocks

    def allocate(self, num_blocks: int) -> list[int] | None:
        """FREE (else evicted) → OWNED with one reference each; all of them or None."""
        if num_blocks > self.available:
            return None
        return [self._take(BlockState.OWNED) for _ in range(num_blocks)]

    def release(self, block_ids: Sequence[int], *, hold_until_s: float | None = None) -> None:
        """Give one reference back on each; the last one makes a published block CACHED, any other FREE.

        block_ids     in block-table order: the tail goes into the eviction order before the head, as a chain
                      without its head is worth nothing
        hold_until_s  clock time until which they are evicted only when nothing else is left
        """
        block_ids = self._sound(block_ids)
        if len(set(block_ids)) != len(block_ids):
            raise InvariantViolated("a block released twice in one call", blocks=list(block_ids))
        for block_id in block_ids:
            if self._state[block_id] is not BlockState.OWNED:
                raise self._illegal("release", block_id)
        self._end_holds()
        for block_id in reversed(block_ids):
            self._num_references[block_id] -= 1
            if self._num_references[block_id] > 0:
                continue
            if block_id not in self._hash_of:
                self._to_free(block_id)
                continue
            self._move(block_id, BlockState.CACHED)
            if hold_until_s is None:
                self._cached[block_id] = None
            else:
                self._num_holds += 1
                self._held[block_id] = self._num_holds
                heapq.heappush(self._hold_ends, (hold_until_s, self._num_holds, block_id))

    # --- grants

    def grant(self, num_blocks: int) -> list[int] | None:
        """FREE (else evicted) → GRANTED; all of them or None."""
        if num_blocks > self.available:
            return None
        return [self._take(BlockState.GRANTED) for _ in range(num_blocks)]

    def adopt(self, block_ids: Sequence[int]) -> None:
        """GRANTED → OWNED with one reference: the hand-off is confirmed."""
        self._require("adopt", block_ids, BlockState.GRANTED)
        for block_id in block_ids:
            self._move(block_id, BlockState.OWNED)
            self._num_references[block_id] = 1

    def free_granted(self, block_ids: Sequence[int]) -> None:
        """GRANTED → FREE: the lease is retired and nothing more will be written into them."""
        block_ids = self._sound(block_ids)
        self._require("free_granted", block_ids, BlockState.GRANTED)
        for block_id in reversed(block_ids):
            self._to_free(block_id)

    def quarantine_granted(self, block_ids: Sequence[int]) -> None:
        """GRANTED → QUARANTINED: a device copy or one-sided read of a dead attempt may still touch them."""
        block_ids = self._sound(block_ids)
        self._require("quarantine_granted", block_ids, BlockState.GRANTED)
        now_s = self._clock.now_s()
        for block_id in block_ids:
            self._quarantined_s[block_id] = now_s
            self._move(block_id, BlockState.QUARANTINED)

    def release_quarantined(self, block_ids: Sequence[int]) -> None:
        """QUARANTINED → FREE: it is over."""
        block_ids = self._sound(block_ids)
        self._require("release_quarantined", block_ids, BlockState.QUARANTINED)
        for block_id in reversed(block_ids):
            del self._quarantined_s[block_id]
            self._to_free(block_id)

    # --- when the books are wrong

    def condemn(self, held: Mapping[BlockState, Container[int]]) -> list[int]:
        """Quarantine for good each block about which the books disagree, and count again: `adds_up` holds afterwards.

        held     who is known to hold blocks that are GRANTED, OWNED or QUARANTINED
        returns  the condemned blocks. What held them may still release them, which means nothing then
        """
        free = Counter(self._free)
        wrong = [
            block_id
            for block_id, state in enumerate(self._state)
            if block_id not in self._condemned and not self._is_right(block_id, state, free, held)
        ]
        for block_id in wrong:
            self._condemned[block_id] = None
            self._unpublish(block_id)
            self._cached.pop(block_id, None)
            self._held.pop(block_id, None)
            self._state[block_id] = BlockState.QUARANTINED
            self._quarantined_s.setdefault(block_id, self._clock.now_s())
            self._num_references[block_id] = 0
        self._free = [block_id for block_id in self._free if block_id not in self._condemned]
        self._counts = [self._state.count(state) for state in BlockState]
        return wrong

    def _is_right(
        self, block_id: int, state: BlockState, free: Counter[int], held: Mapping[BlockState, Container[int]]
    ) -> bool:
        block_hash = self._hash_of.get(block_id)
        num_free = free[block_id]
        num_cached = (block_id in self._cached) + (block_id in self._held)
        num_references = self._num_references[block_id]
        if block_hash is not None and self._block_of.get(block_hash) != block_id:
            return False
        match state:
            case BlockState.FREE:
                return (num_free, num_cached, num_references, block_hash) == (1, 0, 0, None)
            case BlockState.CACHED:
                return (num_free, num_cached, num_references) == (0, 1, 0) and block_hash is not None
            case _:
                is_owned = state is BlockState.OWNED
                return (num_free, num_cached, num_references > 0) == (0, 0, is_owned) and (
                    block_id in held[state]
                )

    def _sound(self, block_ids: Sequence[int]) -> Sequence[int]:
        """Those that are not condemned."""
        if not self._condemned:
            return block_ids
        return [block_id for block_id in block_ids if block_id not in self._condemned]

    # --- moves

    def _take(self, state: BlockState) -> int:
        """One FREE block, or the one that is evicted first, in its new state; the caller has asked `available`."""
        if not self._free:
            self._evict()
        block_id = self._free.pop()
        self._move(block_id, state)
        self._num_references[block_id] = 1 if state is BlockState.OWNED else 0
        return block_id

    def _evict(self) -> None:
        self._end_holds()
        if self._cached:
            block_id, _ = self._cached.popitem(last=False)
        else:
            block_id, _ = self._held.popitem(last=False)
        self._to_free(block_id)

    def _end_holds(self) -> None:
        """Blocks whose hold is over join the ordinary ones, as if released when it ended."""
        now_s = self._clock.now_s()
        while self._hold_ends and self._hold_ends[0][0] <= now_s:
            _, serial, block_id = heapq.heappop(self._hold_ends)
            if self._held.get(block_id) == serial:
                del self._held[block_id]
                self._cached[block_id] = None

    def _to_free(self, block_id: int) -> None:
        self._unpublish(block_id)
        self._move(block_id, BlockState.FREE)
        self._num_references[block_id] = 0
        self._free.append(block_id)

    def _move(self, block_id: int, state: BlockState) -> None:
        self._counts[self._state[block_id]] -= 1
        self._counts[state] += 1
        self._state[block_id] = state

    def _unpublish(self, block_id: int) -> None:
        block_hash = self._hash_of.pop(block_id, None)
        if block_hash is not None and self._block_of.get(block_hash) == block_id:
            del self._block_of[block_hash]
            self._note(block_hash, stored=False)

    def _note(self, block_hash: bytes, *, stored: bool) -> None:
        """Remember the net change only: a pair of opposite ones is none."""
        if block_hash in self._changes:
            del self._changes[block_hash]
        else:
            self._changes[block_hash] = stored

    def _require(self, move: str, block_ids: Sequence[int], state: BlockState) -> None:
        if len(set(block_ids)) != len(block_ids):
            raise InvariantViolated(f"{move}: a block named twice", blocks=list(block_ids))
        for block_id in block_ids:
            if self._state[block_id] is not state:
                raise self._illegal(move, block_id)

    def _illegal(self, move: str, block_id: int) -> InvariantViolated:
        state = self._state[block_id].name
        return InvariantViolated(f"{move} isn't allowed in this state", block=block_id, state=state)
