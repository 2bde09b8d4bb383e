"""A TCP proxy on loopback that stops passing bytes when told to, as a pulled cable does."""

from __future__ import annotations

import asyncio
import contextlib
from types import TracebackType
from typing import Self

from pdserve.service.address import join_address, split_address


class Proxy:
    """Forwards every connection to `target` until `cut`; then connections stay open and silent."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._passes = asyncio.Event()
        self._passes.set()
        self._server: asyncio.Server
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: list[asyncio.Task[None]] = []
        self.address = ""

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._on_connection, "127.0.0.1", 0)
        self.address = join_address("127.0.0.1", self._server.sockets[0].getsockname()[1])
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        for writer in self._writers:
            writer.close()

    def cut(self) -> None:
        """Pass nothing any more, in either direction."""
        self._passes.clear()

    async def _on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(*split_address(self._target))
        self._writers += [writer, back]
        for source, sink in ((reader, back), (there, writer)):
            self._tasks.append(asyncio.create_task(self._pass_on(source, sink)))

    async def _pass_on(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):  # either side may hang up at any time
            while octets := await source.read(1 << 16):
                await self._passes.wait()
                sink.write(octets)
                await sink.drain()
        sink.close()
