"""Bodies of requests: their size is known before they are read, and they come in within a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from http_door.errors import HttpRefusal

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]


class ClientGone(Exception):
    """The client has hung up: nobody is left to be answered."""


def check_announced(length: str | None, most_bytes: int) -> None:
    """Raises HttpRefusal for a Content-Length that is too much, or no number."""
    if length is None:
        return
    if not (length.isascii() and length.isdigit()):
        raise HttpRefusal(400, "Content-Length isn't a number", value=length[:80])
    if len(length) > 20 or int(length) > most_bytes:
        raise _too_large(most_bytes)


async def read_all(receive: Receive, most_bytes: int, most_s: float) -> bytes:
    """The body, when it is whole. Raises HttpRefusal: 413, or 408 if it doesn't come within most_s; ClientGone."""
    try:
        async with asyncio.timeout(most_s):
            return await _read_all(receive, most_bytes)
    except TimeoutError:
        raise HttpRefusal(408, "the body came too slowly", limit_s=most_s) from None


async def _read_all(receive: Receive, most_bytes: int) -> bytes:
    parts: list[bytes] = []
    num_bytes = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        num_bytes += len(part)
        if num_bytes > most_bytes:
            raise _too_large(most_bytes)
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


def _too_large(most_bytes: int) -> HttpRefusal:
    return HttpRefusal(413, "the body is too large", limit_bytes=most_bytes)
