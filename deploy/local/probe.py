"""Asking a child over HTTP, without a client library: the supervisor stays small."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from pdserve.service.address import split_address

_LIMIT_S = 2.0


@dataclass(frozen=True, slots=True)
class Loaded:
    """How far a worker has loaded its weights."""

    num_bytes: int
    total_bytes: int


NOTHING = Loaded(0, 0)
"""Of a worker that doesn't say yet."""


async def is_ready(address: str) -> bool:
    """Whether /readyz at host:port answers 200 now; a child that isn't listening yet is not ready."""
    return await why_not_ready(address) is None


async def why_not_ready(address: str) -> str | None:
    """What /readyz at host:port says it lacks, in one line, "" if nobody answers; None = it is ready."""
    answer = await fetch(address, "/readyz")
    if answer is None:
        return ""
    status, body = answer
    return None if status == 200 else ", ".join(body.split("\n")[:-1])


async def fetch_loaded(address: str) -> Loaded | None:
    """What /metrics at host:port says of the weights; None if nobody answers."""
    answer = await fetch(address, "/metrics")
    if answer is None:
        return None
    loaded, total = (gauge(answer[1], f"pdserve_model_{kind}bytes") for kind in ("loaded_", ""))
    return Loaded(int(loaded), int(total))


def gauge(text: str, name: str) -> float:
    """The value of a gauge without labels in Prometheus text; 0 if it isn't there."""
    for line in text.splitlines():
        if line.startswith(name + " "):
            return float(line.split()[1])
    return 0.0


async def fetch(address: str, path: str) -> tuple[int, str] | None:
    """Status and body of a GET, or None if nobody answers within 2 s."""
    host, port = split_address(address)
    try:
        async with asyncio.timeout(_LIMIT_S):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(f"GET {path} HTTP/1.0\r\nHost: {address}\r\n\r\n".encode())
                raw = await reader.read()
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return None
    head, _, body = raw.decode(errors="replace").partition("\r\n\r\n")
    words = head.split(None, 2)
    if len(words) < 2 or not words[1].isdigit():
        return None
    return int(words[1]), body
