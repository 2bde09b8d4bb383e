"""One request's connection: noticing that the client is gone, and what is written to it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from http_door.body import ClientGone, Receive

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Connection:
    """From the end of a request's body to the end of its answer. Of one task, which `while_there` may cancel."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self._ended = False
        self.status = 0  # of the answer; 0 = none was begun

    @contextlib.asynccontextmanager
    async def while_there(self) -> AsyncIterator[None]:
        """Ends its block with ClientGone as soon as the client hangs up."""
        task = asyncio.current_task()
        assert task is not None, "requests are served in tasks"
        gone = False

        async def watch() -> None:
            nonlocal gone
            while (await self._receive())["type"] != "http.disconnect":
                pass
            if not self._ended:
                gone = True
                task.cancel()

        watching = asyncio.create_task(watch())
        try:
            yield
        except asyncio.CancelledError:
            if not gone:
                raise
            task.uncancel()
            raise ClientGone from None
        finally:
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
        self._ended = True
        await self._send({"type": "http.response.body", "body": content})

    async def answer(self, status: int, content: bytes, headers: Mapping[str, str]) -> None:
        """All of it at once, as JSON unless the headers say otherwise."""
        given = {"content-type": "application/json", "content-length": str(len(content)), **headers}
        await self.begin(status, given)
        await self.end(content)
