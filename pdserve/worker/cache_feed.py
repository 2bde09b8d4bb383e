"""The worker's end of CacheEvents: what the prefix cache holds, told to each router that listens.

Messages of one reader are numbered 1, 2, 3, …; a reader that missed one asks for a snapshot. A reader that lags too
far behind gets a snapshot instead of the changes it didn't take, so nothing here grows without bound.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from pdserve.block_messages import BlocksRemoved, BlocksStored, CacheEvent, SnapshotPart

_MAX_PENDING = 1 << 16
_HASHES_PER_MESSAGE = 1024


class CacheFeed:
    """The set of hashes that are hits now, and those who want to know. Loop only."""

    def __init__(self, max_pending: int = _MAX_PENDING) -> None:
        self._max_pending = max_pending
        self._hashes: dict[bytes, None] = {}
        self._readers: dict[int, CacheReader] = {}
        self._next_id = 0

    def change(self, changes: Iterable[tuple[bool, bytes]]) -> None:
        """Take in changes in order: (True, hash) = became a hit, (False, hash) = is gone."""
        changes = tuple(changes)
        for stored, block_hash in changes:
            if stored:
                self._hashes[block_hash] = None
            else:
                self._hashes.pop(block_hash, None)
        for reader in self._readers.values():
            reader.push(changes)

    def hashes(self) -> tuple[bytes, ...]:
        return tuple(self._hashes)

    def subscribe(self, wake: Callable[[], None]) -> CacheReader:
        """A new reader, which begins with a snapshot. wake: called when `take` has something again."""
        self._next_id += 1
        reader = CacheReader(self, self._next_id, self._max_pending, wake)
        self._readers[self._next_id] = reader
        return reader

    def drop(self, reader_id: int) -> None:
        self._readers.pop(reader_id, None)


class CacheReader:
    """One router's place in the feed. Loop only."""

    def __init__(self, feed: CacheFeed, reader_id: int, max_pending: int, wake: Callable[[], None]) -> None:
        self._feed = feed
        self._id = reader_id
        self._max_pending = max_pending
        self._wake = wake
        self._sequence = 0
        self._pending: deque[tuple[bool, bytes]] = deque()
        self._parts: deque[SnapshotPart] = deque()
        self._snapshot_due = True

    def snapshot(self) -> None:
        """The reader missed a message: start over from the whole set."""
        self._snapshot_due = True
        self._parts.clear()
        self._pending.clear()
        self._wake()

    def push(self, changes: tuple[tuple[bool, bytes], ...]) -> None:
        if self._snapshot_due:
            return  # the snapshot will hold them
        if len(self._pending) + len(changes) > self._max_pending:
            self.snapshot()
            return
        self._pending.extend(changes)
        self._wake()

    def take(self) -> CacheEvent | None:
        """The next message, or None when the reader knows everything."""
        if self._snapshot_due:
            self._cut_snapshot()
        if self._parts:
            part = self._parts.popleft()
            return SnapshotPart(self._next(), part.hashes, part.first, part.last)
        if not self._pending:
            return None
        kind = self._pending[0][0]
        hashes: list[bytes] = []
        while self._pending and self._pending[0][0] is kind and len(hashes) < _HASHES_PER_MESSAGE:
            hashes.append(self._pending.popleft()[1])
        return (BlocksStored if kind else BlocksRemoved)(self._next(), tuple(hashes))

    def close(self) -> None:
        """Idempotent."""
        self._feed.drop(self._id)

    def _next(self) -> int:
        self._sequence += 1
        return self._sequence

    def _cut_snapshot(self) -> None:
        self._snapshot_due = False
        hashes = self._feed.hashes()
        starts = range(0, max(len(hashes), 1), _HASHES_PER_MESSAGE)
        for start in starts:
            part = hashes[start : start + _HASHES_PER_MESSAGE]
            self._parts.append(SnapshotPart(0, part, start == 0, start == starts[-1]))
