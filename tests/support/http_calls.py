"""Calls of an HTTP server over a socket, byte by byte where a test wants it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

from pdserve.service.address import split_address

LIMIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole answer; header names in small letters."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """Of an error object."""
        found: dict[str, Any] = self.json["error"]
        return found


class HttpStream:
    """One connection after the head of its answer."""

    def __init__(
        self,
        status: int,
        headers: Mapping[str, str],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self.status = status
        self.headers = headers
        self.writer = writer
        self._reader = reader

    async def lines(self) -> AsyncIterator[str]:
        """The body's lines as they come, without empty ones; to the end of the body."""
        rest = b""
        async for part in self.parts():
            *whole, rest = (rest + part).split(b"\n")
            for line in whole:
                if line:
                    yield line.decode()

    async def events(self) -> AsyncIterator[Any]:
        """What follows `data: `, as JSON; "[DONE]" as such."""
        async for line in self.lines():
            if line.startswith("data: "):
                text = line.removeprefix("data: ")
                yield text if text == "[DONE]" else json.loads(text)

    async def rest(self) -> bytes:
        """All that comes until the server closes the connection."""
        return await self._reader.read()

    async def parts(self) -> AsyncIterator[bytes]:
        """The body as it comes."""
        if self.headers.get("transfer-encoding") == "chunked":
            while size := int((await self._reader.readline()).strip() or b"0", 16):
                yield await self._reader.readexactly(size)
                await self._reader.readline()
        else:
            yield await self._reader.readexactly(int(self.headers.get("content-length", "0")))


def request_bytes(
    method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
) -> bytes:
    """A request as it goes over the wire."""
    given = {"Host": "test", "Content-Length": str(len(body)), **(headers or {})}
    head = "".join(f"{name}: {value}\r\n" for name, value in given.items())
    return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + body


@contextlib.asynccontextmanager
async def stream(
    address: str,
    path: str,
    body: Any = None,
    *,
    headers: Mapping[str, str] | None = None,
    tls: ssl.SSLContext | None = None,
) -> AsyncIterator[HttpStream]:
    """A request whose answer is read while it comes; its connection is closed at the end of the block."""
    raw = b"" if body is None else json.dumps(body).encode()
    sent = request_bytes("GET" if body is None else "POST", path, raw, headers)
    async with sending(address, sent, tls=tls) as opened:
        yield opened


@contextlib.asynccontextmanager
async def sending(
    address: str, raw: bytes, *, tls: ssl.SSLContext | None = None
) -> AsyncIterator[HttpStream]:
    """Any bytes, and the answer to them."""
    host, port = split_address(address.partition("://")[2] or address)
    reader, writer = await asyncio.open_connection(host, port, ssl=tls, limit=1 << 22)
    try:
        writer.write(raw)
        async with asyncio.timeout(LIMIT_S):
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        pairs = (line.partition(": ") for line in head[1:] if line)
        yield HttpStream(
            int(head[0].split(" ")[1]), {name.lower(): value for name, _, value in pairs}, reader, writer
        )
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            await writer.wait_closed()


async def call(
    address: str,
    path: str,
    body: Any = None,
    *,
    headers: Mapping[str, str] | None = None,
    tls: ssl.SSLContext | None = None,
) -> Reply:
    """A request and its whole answer: GET without a body, else POST of it as JSON."""
    async with stream(address, path, body, headers=headers, tls=tls) as opened, asyncio.timeout(LIMIT_S):
        content = b"".join([part async for part in opened.parts()])
        return Reply(opened.status, opened.headers, content)
