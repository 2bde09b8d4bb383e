"""One request's connection: noticing that the client is gone, and what is written to it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, MutableMapping
from typing import Any

from http_door.body import ClientGone, Receive

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Connection:
    """From the end of a request's body to the end of its answer. Of one task, which `while_there` may cancel."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self._task: asyncio.Task[None] | None = None  # while it may be cancelled
        self._ended_by: Exception | None = None
        self.status = 0  # of the answer; 0 = none was begun

    def end_by(self, error: Exception) -> None:
        """Nothing more is to be made for it: `while_there` raises this. No effect outside of its block."""
        if self._task is not None and self._ended_by is None:
            self._ended_by = error
            self._task.cancel()

    @contextlib.asynccontextmanager
    async def while_there(self) -> AsyncIterator[None]:
        """Ends its block with ClientGone as soon as the client hangs up."""
        task = self._task = asyncio.current_task()
        assert task is not None, "requests are served in tasks"

        async def watch() -> None:
            while (await self._receive())["type"] != "http.disconnect":
                pass
            self.end_by(ClientGone())

        watching = asyncio.create_task(watch())
        try:
            yield
        except asyncio.CancelledError:
            if self._ended_by is None:
                raise
            task.uncancel()
            raise self._ended_by from None
        finally:
            self._task = None
            watching.cancel()

    async def begin(self, status: int, headers: Mapping[str, str]) -> None:
        """Status and headers."""
        self.status = status
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})

    async def write(self, content: bytes) -> None:
        """More of the answer; waits while the client doesn't read."""
        await self._send({"type": "http.response.body", "body": content, "more_body": True})

    async def end(self, content: bytes = b"") -> None:
        """The last of the answer."""
        await self._send({"type": "http.response.body", "body": content})

    async def answer(self, status: int, content: bytes, headers: Mapping[str, str]) -> None:
        """All of it at once, as JSON unless the headers say otherwise."""
        given = {"content-type": "application/json", "content-length": str(len(content)), **headers}
        await self.begin(status, given)
        await self.end(content)


class OpenConnections:
    """All that are being served, for the end of a process. Event-loop thread only."""

    def __init__(self) -> None:
        self._open: dict[Connection, None] = {}
        self._none = asyncio.Event()
        self._none.set()

    @contextlib.contextmanager
    def counted(self, connection: Connection) -> Iterator[None]:
        """It is being served for the block."""
        self._open[connection] = None
        self._none.clear()
        try:
            yield
        finally:
            del self._open[connection]
            if not self._open:
                self._none.set()

    async def none_left(self, limit_s: float) -> bool:
        """Whether all have ended, at the latest after limit_s."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._none.wait(), limit_s)
        return not self._open

    def end_by(self, error: Exception) -> None:
        """End those that are left."""
        for each in tuple(self._open):
            each.end_by(error)
