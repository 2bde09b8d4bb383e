"""Server-sent events on one connection, with comments while there is nothing to send."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from http_door.connection import Connection

COMMENT_S = 10.0  # proxies close what is silent for a minute, some sooner
_COMMENT = b": wait\n\n"
_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # nginx would keep parts back
}


class EventStream:
    """One answer that comes in parts. Event-loop thread only.

    comment_s  how long it may be silent: before its first part, while calls are held back, while a worker is replaced
    """

    def __init__(self, client: Connection, headers: dict[str, str], comment_s: float) -> None:
        self._client = client
        self._headers = {**_HEADERS, **headers}
        self._comment_s = comment_s
        self._loop = asyncio.get_running_loop()
        self._wrote_at_s = self._loop.time()
        self._writing = asyncio.Lock()  # a comment may be waiting for a slow reader

    @contextlib.asynccontextmanager
    async def kept_open(self) -> AsyncIterator[None]:
        """Comments go out whenever nothing else does; none after the block."""
        commenting = asyncio.create_task(self._comment())
        try:
            yield
        finally:
            commenting.cancel()
            await asyncio.wait((commenting,))
            # Asked for in any case: what nobody asks for goes to the log when the task is collected.
            lost = None if commenting.cancelled() else commenting.exception()
        if lost is not None:
            raise lost

    async def begin(self) -> None:
        """Status and headers, unless they have been sent."""
        async with self._writing:
            await self._begin()

    async def write(self, content: bytes) -> None:
        """Parts; waits while the client doesn't read."""
        async with self._writing:
            await self._begin()
            await self._client.write(content)
            self._wrote_at_s = self._loop.time()

    async def _begin(self) -> None:
        if self._client.status == 0:
            await self._client.begin(200, self._headers)

    async def _comment(self) -> None:
        while True:
            left_s = self._wrote_at_s + self._comment_s - self._loop.time()
            if left_s <= 0:
                await self.write(_COMMENT)
            else:
                await asyncio.sleep(left_s)
