"""The HTTP endpoints: good answers, and an answer to everything else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from prometheus_client import CollectorRegistry, Counter

from pdserve.service.address import split_address
from pdserve.service.http import MAX_CONNECTIONS, MAX_REQUEST_BYTES, HttpServer
from pdserve.service.settings import ConfigError


class Served:
    """A server with a counter at 3, and its reasons."""

    def __init__(self) -> None:
        registry = CollectorRegistry()
        Counter("pdserve_things", "Things.", registry=registry).inc(3)
        self.dead: list[str] = []
        self.waiting: list[str] = []
        self.server = HttpServer(registry, lambda: self.dead, lambda: self.waiting)
        self.address = ""

    async def ask(self, request: bytes) -> tuple[int, bytes, bytes]:
        reader, writer = await asyncio.open_connection(*split_address(self.address))
        writer.write(request)
        async with asyncio.timeout(20):
            answer = await reader.read()
        writer.close()
        head, _, body = answer.partition(b"\r\n\r\n")
        return int(head.split()[1]), head, body

    async def get(self, path: str) -> tuple[int, bytes]:
        status, head, body = await self.ask(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        assert f"Content-Length: {len(body)}".encode() in head
        return status, body


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    served = Served()
    served.address = await served.server.start("127.0.0.1:0")
    yield served
    served.server.close()
    served.server.close()


async def test_metrics(served: Served) -> None:
    status, body = await served.get("/metrics?x=1")
    assert status == 200
    assert b"pdserve_things_total 3.0" in body


async def test_health_and_readiness_give_their_reasons(served: Served) -> None:
    assert await served.get("/healthz") == (200, b"ok\n")
    assert await served.get("/readyz") == (200, b"ok\n")
    served.dead = ["the engine hangs"]
    served.waiting = ["weights are not loaded", "no router joined"]
    assert await served.get("/healthz") == (503, b"the engine hangs\n")
    assert await served.get("/readyz") == (503, b"weights are not loaded\nno router joined\n")


async def test_head_has_no_body(served: Served) -> None:
    status, head, body = await served.ask(b"HEAD /readyz HTTP/1.1\r\n\r\n")
    assert (status, body) == (200, b"")
    assert b"Content-Length: 3" in head


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET /nothing HTTP/1.1\r\n\r\n", 404),
        (b"GET /%ff\xff HTTP/1.1\r\n\r\n", 404),
        (b"POST /metrics HTTP/1.1\r\n\r\n", 405),
        (b"hello\r\n\r\n", 400),
        (b"GET /metrics HTTP/2.0\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nX: " + b"x" * MAX_REQUEST_BYTES + b"\r\n\r\n", 431),
    ],
    ids=["path", "bytes", "method", "words", "version", "size"],
)
async def test_bad_requests_are_answered(served: Served, request_bytes: bytes, status: int) -> None:
    assert (await served.ask(request_bytes))[0] == status
    assert (await served.get("/healthz"))[0] == 200


async def test_a_half_request_is_answered_and_silence_is_left(served: Served) -> None:
    reader, writer = await asyncio.open_connection(*split_address(served.address))
    writer.write(b"GET /met")
    writer.write_eof()
    assert (await reader.read()).startswith(b"HTTP/1.1 400")
    writer.close()
    reader, writer = await asyncio.open_connection(*split_address(served.address))
    writer.write_eof()
    assert await reader.read() == b""
    writer.close()


async def test_connections_are_bounded(served: Served) -> None:
    idle = [await asyncio.open_connection(*split_address(served.address)) for _ in range(MAX_CONNECTIONS)]
    reader, writer = await asyncio.open_connection(*split_address(served.address))
    try:
        answer = await reader.read()
    except ConnectionError:  # reset, if the abort comes before the end of the stream
        answer = b""
    assert answer == b""
    writer.close()
    for _, idle_writer in idle:
        idle_writer.close()


async def test_a_taken_port_is_a_configuration_error(served: Served) -> None:
    with pytest.raises(ConfigError, match=r"metrics\.listen: can't listen on"):
        await Served().server.start(served.address)
