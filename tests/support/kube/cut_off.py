"""Stands between a process and the API server, passes bytes on, and can cut all of its connections."""

from __future__ import annotations

import asyncio
import contextlib
from types import TracebackType
from typing import Self

from pdserve.service.address import split_address


class Between:
    """`async with Between("localhost:6443") as between: … between.port`; event-loop thread only."""

    def __init__(self, server: str) -> None:
        self._server = split_address(server)
        self._passing: set[asyncio.Task[None]] = set()
        self._is_cut = False

    async def __aenter__(self) -> Self:
        self._listener = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = int(self._listener.sockets[0].getsockname()[1])
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.close()
        await self.cut()

    async def cut(self) -> None:
        """End all connections, and refuse new ones until `mend`."""
        self._is_cut = True
        passing = list(self._passing)
        for each in passing:
            each.cancel()
        await asyncio.gather(*passing, return_exceptions=True)

    def mend(self) -> None:
        """Connections are passed on again."""
        self._is_cut = False

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_cut:
            writer.close()
            return
        task = asyncio.ensure_future(self._pass_on(reader, writer))
        self._passing.add(task)
        task.add_done_callback(self._passing.discard)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        to_server: asyncio.StreamWriter | None = None
        with contextlib.suppress(OSError):
            try:
                from_server, to_server = await asyncio.open_connection(*self._server)
                async with asyncio.TaskGroup() as both:
                    both.create_task(_copy(reader, to_server))
                    both.create_task(_copy(from_server, writer))
            finally:
                for each in (writer, to_server):
                    if each is not None:
                        each.transport.abort()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while piece := await reader.read(1 << 16):
            writer.write(piece)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
