"""A small HTTP server for machines: /metrics, /healthz and /readyz, on the process's event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence

import structlog
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from pdserve.service.address import join_address, split_address
from pdserve.service.settings import ConfigError

MAX_REQUEST_BYTES = 8192
REQUEST_S = 5.0  # for the whole request, and again for the answer
MAX_CONNECTIONS = 64

Reasons = Callable[[], Sequence[str]]
"""Why the process is not alive, or not ready; nothing = it is."""

log = structlog.get_logger()


class HttpServer:
    """Answers GET and HEAD, one request a connection.

    not_alive  for /healthz: an answer other than 200 means "restart me"
    not_ready  for /readyz: 503 with the reasons as text, one a line
    """

    def __init__(self, registry: CollectorRegistry, not_alive: Reasons, not_ready: Reasons) -> None:
        self._registry = registry
        self._not_alive = not_alive
        self._not_ready = not_ready
        self._connections: dict[asyncio.Task[None], None] = {}
        self._server: asyncio.Server | None = None

    async def start(self, address: str) -> str:
        """Listen on HOST:PORT; returns it with the real port. Raises ConfigError."""
        host, port = split_address(address)
        try:
            self._server = await asyncio.start_server(
                self._on_connection, host, port, limit=MAX_REQUEST_BYTES
            )
        except OSError as error:
            raise ConfigError(
                f"metrics.listen: can't listen on {address}: {error.strerror or error}"
            ) from error
        return join_address(host, self._server.sockets[0].getsockname()[1])

    def close(self) -> None:
        """Stop listening and end what is open; idempotent."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for connection in tuple(self._connections):
            connection.cancel()

    def _on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._connections) >= MAX_CONNECTIONS:
            log.warning("http.too_many_connections", limit=MAX_CONNECTIONS)
            writer.transport.abort()
            return
        connection = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._connections[connection] = None
        connection.add_done_callback(lambda done: self._connections.pop(done, None))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(REQUEST_S):
                writer.write(await self._answer(reader))
            async with asyncio.timeout(REQUEST_S):
                await writer.drain()
        except (TimeoutError, ConnectionError):
            log.debug("http.aborted")
        except Exception:  # outermost frame of one connection
            log.exception("http.failed")
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError, TimeoutError):  # the peer may be gone already
                async with asyncio.timeout(REQUEST_S):
                    await writer.wait_closed()

    async def _answer(self, reader: asyncio.StreamReader) -> bytes:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            return _response(431, f"a request may have {MAX_REQUEST_BYTES} bytes\n")
        except asyncio.IncompleteReadError as error:
            return _response(400, "not an HTTP request\n") if error.partial else b""
        words = head.split(b"\r\n", 1)[0].split(b" ")
        if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
            return _response(400, "not an HTTP request\n")
        if words[0] not in (b"GET", b"HEAD"):
            return _response(405, "only GET and HEAD\n", "Allow: GET, HEAD\r\n")
        answer = self._page(words[1].split(b"?", 1)[0].decode("ascii", "replace"))
        return answer if words[0] == b"GET" else answer[: answer.index(b"\r\n\r\n") + 4]

    def _page(self, path: str) -> bytes:
        match path:
            case "/metrics":
                body = generate_latest(self._registry).decode()
                return _response(200, body, content_type=CONTENT_TYPE_LATEST)
            case "/healthz":
                return _state(self._not_alive())
            case "/readyz":
                return _state(self._not_ready())
            case _:
                return _response(404, "try /metrics, /healthz or /readyz\n")


def _state(reasons: Sequence[str]) -> bytes:
    if not reasons:
        return _response(200, "ok\n")
    return _response(503, "".join(f"{reason}\n" for reason in reasons))


_PHRASES = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    431: "Request Header Fields Too Large",
    503: "Service Unavailable",
}


def _response(
    status: int, body: str, headers: str = "", content_type: str = "text/plain; charset=utf-8"
) -> bytes:
    octets = body.encode()
    head = (
        f"HTTP/1.1 {status} {_PHRASES[status]}\r\nContent-Type: {content_type}\r\n"
        f"Content-Length: {len(octets)}\r\nConnection: close\r\n{headers}\r\n"
    )
    return head.encode() + octets
