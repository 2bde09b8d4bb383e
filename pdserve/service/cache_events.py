"""Block events of a worker's prefix cache between a worker and a router: the two ends.

Every message has the next sequence number; a reader that finds a gap asks for a snapshot.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from pdserve.block_messages import CacheEvent
from pdserve.ids import WorkerRef


class CacheEvents(Protocol):
    """The router's end. Event-loop thread only."""

    @property
    def worker(self) -> WorkerRef: ...

    async def receive(self) -> CacheEvent:
        """The next event, in order; the first is a snapshot's first part. WorkerLost when the stream has ended."""
        ...

    def ask_snapshot(self) -> None:
        """Ask for the whole set again."""
        ...


class CacheSource(Protocol):
    """The worker's end for one router: what it has not been told yet. Event-loop thread only."""

    def take(self) -> CacheEvent | None:
        """The next event; None when the router knows everything, until `wake` is called."""
        ...

    def snapshot(self) -> None:
        """The router missed something: start over from the whole set."""
        ...

    def close(self) -> None:
        """The router is gone; idempotent."""
        ...


Subscribe = Callable[[Callable[[], None]], CacheSource]
"""Opens a source; the function given to it is called whenever `take` has something again."""


class SourceReader:
    """Waits for the events of one source."""

    def __init__(self, subscribe: Subscribe) -> None:
        self._changed = asyncio.Event()
        self._source = subscribe(self._changed.set)

    async def next(self) -> CacheEvent:
        """The next event."""
        while True:
            event = self._source.take()
            if event is not None:
                return event
            self._changed.clear()
            await self._changed.wait()

    def snapshot(self) -> None:
        """Start over from the whole set."""
        self._source.snapshot()

    def close(self) -> None:
        """Idempotent."""
        self._source.close()
