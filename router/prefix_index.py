"""Which prefix blocks one worker holds, from its block events.

Events carry sequence numbers, + 1 each. A gap, or an event before the first snapshot, makes the index ask for a
snapshot and take nothing in until one begins; what it knew before stays, because it is used as a hint only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum

from pdserve.block_messages import BlocksRemoved, BlocksStored, CacheEvent, SnapshotPart


class IndexState(Enum):
    """How far the index can be trusted."""

    EMPTY = "empty"  # no event source has begun
    FOLLOWING = "following"
    IN_SNAPSHOT = "in_snapshot"
    LOST = "lost"  # a snapshot was asked for


class PrefixIndex:
    """The set of block hashes of one worker. Event-loop thread only."""

    def __init__(self) -> None:
        self.state = IndexState.EMPTY
        self.num_gaps = 0
        self._hashes: dict[bytes, None] = {}
        self._arriving: dict[bytes, None] = {}  # the snapshot being read; replaces _hashes with its last part
        self._sequence = 0
        self._has_begun = False

    @property
    def has_begun(self) -> bool:
        """Whether a first snapshot has come: from then on it is right, or a little late."""
        return self._has_begun

    def __len__(self) -> int:
        return len(self._hashes)

    def holds_exactly(self, hashes: Iterable[bytes]) -> bool:
        """Whether these are the hashes that it knows; for tests and simulations."""
        return self._hashes.keys() == dict.fromkeys(hashes).keys()

    def apply(self, event: CacheEvent) -> bool:
        """Take in one event.

        returns  whether a snapshot must be asked for now; said once per gap
        """
        match event:
            case SnapshotPart():
                return self._apply_part(event)
            case BlocksStored() | BlocksRemoved():
                return self._apply_change(event)

    def num_hits(self, hashes: Sequence[bytes]) -> int:
        """How many leading blocks of a chain the worker holds."""
        hits = 0
        for block_hash in hashes:
            if block_hash not in self._hashes:
                break
            hits += 1
        return hits

    def _apply_change(self, event: BlocksStored | BlocksRemoved) -> bool:
        if self.state is IndexState.LOST:
            return False
        if self.state is not IndexState.FOLLOWING or event.sequence != self._sequence + 1:
            return self._lose()
        self._sequence = event.sequence
        for block_hash in event.hashes:
            if isinstance(event, BlocksStored):
                self._hashes[block_hash] = None
            else:
                self._hashes.pop(block_hash, None)
        return False

    def _apply_part(self, part: SnapshotPart) -> bool:
        if part.first:
            self._arriving = {}
            self.state = IndexState.IN_SNAPSHOT
        elif self.state is IndexState.LOST:
            return False
        elif self.state is not IndexState.IN_SNAPSHOT or part.sequence not in (
            self._sequence,
            self._sequence + 1,
        ):
            return self._lose()
        self._sequence = part.sequence
        self._arriving.update(dict.fromkeys(part.hashes))
        if part.last:
            self._hashes, self._arriving = self._arriving, {}
            self.state = IndexState.FOLLOWING
            self._has_begun = True
        return False

    def _lose(self) -> bool:
        self.state = IndexState.LOST
        self.num_gaps += 1
        return True
