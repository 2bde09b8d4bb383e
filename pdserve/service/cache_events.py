"""Block events of a worker's prefix cache: a mirror that can make snapshots, and a bounded feed for each router.

Every message has the next sequence number. A feed that overflows forgets what it held and goes on with a
snapshot, so a slow router costs the worker nothing and always ends with the true set.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

from pdserve.ids import WorkerRef
from pdserve.messages import BlocksRemoved, BlocksStored, CacheEvent, SnapshotPart

MESSAGE_HASHES = 2048  # 32 KiB
FEED_MESSAGES = 256

Change = tuple[Literal["stored", "removed"], bytes]


class CacheEvents(Protocol):
    """The router's side of one worker's events. Event-loop thread only."""

    @property
    def worker(self) -> WorkerRef: ...

    async def receive(self) -> CacheEvent:
        """The next event, in order; the first is the first part of a snapshot. WorkerLost when the stream ended."""
        ...

    def ask_snapshot(self) -> None:
        """Ask for the whole set again, after a gap in the sequence."""
        ...


class CacheMirror:
    """The hashes that a worker's prefix cache holds now. Event-loop thread only."""

    def __init__(self) -> None:
        self._hashes: dict[bytes, None] = {}
        self._feeds: dict[int, CacheFeed] = {}
        self._num_opened = 0

    def __len__(self) -> int:
        return len(self._hashes)

    def apply(self, changes: Sequence[Change]) -> None:
        """Take over changes in order, as `BlockPool.take_events` gives them, and pass them on to every feed."""
        for kind, hashes in _runs(changes):
            if kind == "stored":
                self._hashes.update(dict.fromkeys(hashes))
            else:
                for block_hash in hashes:
                    self._hashes.pop(block_hash, None)
            for feed in self._feeds.values():
                feed.add(kind, hashes)

    def open_feed(self) -> CacheFeed:
        """A feed for one router; it begins with a snapshot."""
        number = self._num_opened
        self._num_opened += 1
        feed = CacheFeed(lambda: tuple(self._hashes), lambda: self._feeds.pop(number, None))
        self._feeds[number] = feed
        return feed


class CacheFeed:
    """Events for one router. Event-loop thread only; one reader."""

    def __init__(self, hashes: Callable[[], tuple[bytes, ...]], on_close: Callable[[], object]) -> None:
        self._hashes = hashes
        self._on_close = on_close
        self._waiting: deque[tuple[Literal["stored", "removed"], tuple[bytes, ...]]] = deque()
        self._snapshot: deque[tuple[tuple[bytes, ...], bool, bool]] = deque()
        self._snapshot_is_due = True
        self._sequence = 0
        self._changed = asyncio.Event()

    def add(self, kind: Literal["stored", "removed"], hashes: tuple[bytes, ...]) -> None:
        """Queue one event; too many and they become a snapshot."""
        if self._snapshot_is_due:
            return
        if len(self._waiting) >= FEED_MESSAGES:
            self.request_snapshot()
            return
        self._waiting.append((kind, hashes))
        self._changed.set()

    def request_snapshot(self) -> None:
        """Send the whole set next, instead of what waits."""
        self._waiting.clear()
        self._snapshot.clear()
        self._snapshot_is_due = True
        self._changed.set()

    async def next(self) -> CacheEvent:
        """The next event to send."""
        while not (self._snapshot_is_due or self._snapshot or self._waiting):
            self._changed.clear()
            await self._changed.wait()
        if self._snapshot_is_due:
            self._cut_snapshot()
        self._sequence += 1
        if self._snapshot:
            hashes, first, last = self._snapshot.popleft()
            return SnapshotPart(self._sequence, hashes, first, last)
        kind, hashes = self._waiting.popleft()
        return (BlocksStored if kind == "stored" else BlocksRemoved)(self._sequence, hashes)

    def close(self) -> None:
        """Take no more events; idempotent."""
        self._on_close()

    def _cut_snapshot(self) -> None:
        # Taken as of now; changes from here on wait behind its last part.
        hashes = self._hashes()
        parts = _pieces(hashes) or [()]
        self._snapshot.extend((part, n == 0, n == len(parts) - 1) for n, part in enumerate(parts))
        self._snapshot_is_due = False


class MemoryCacheEvents:
    """A feed read inside one process, each event after a drawn delay; see CacheEvents."""

    def __init__(
        self,
        worker: WorkerRef,
        feed: CacheFeed,
        schedule: Callable[[float, Callable[[], None]], object],
        delay: Callable[[], float],
    ) -> None:
        self._worker = worker
        self._feed = feed
        self._schedule = schedule
        self._delay = delay

    @property
    def worker(self) -> WorkerRef:
        return self._worker

    async def receive(self) -> CacheEvent:
        event = await self._feed.next()
        arrived = asyncio.Event()
        self._schedule(max(0.0, self._delay()), arrived.set)
        await arrived.wait()
        return event

    def ask_snapshot(self) -> None:
        self._schedule(max(0.0, self._delay()), self._feed.request_snapshot)


def _runs(changes: Sequence[Change]) -> list[tuple[Literal["stored", "removed"], tuple[bytes, ...]]]:
    """Neighbours of one kind together, at most MESSAGE_HASHES each; the order stays."""
    runs: list[tuple[Literal["stored", "removed"], list[bytes]]] = []
    for kind, block_hash in changes:
        if not runs or runs[-1][0] != kind or len(runs[-1][1]) >= MESSAGE_HASHES:
            runs.append((kind, []))
        runs[-1][1].append(block_hash)
    return [(kind, tuple(hashes)) for kind, hashes in runs]


def _pieces(hashes: tuple[bytes, ...]) -> list[tuple[bytes, ...]]:
    return [hashes[at : at + MESSAGE_HASHES] for at in range(0, len(hashes), MESSAGE_HASHES)]
