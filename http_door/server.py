"""uvicorn in our process: on our loop, by our signals and our drain, with bounds on what a connection may hold."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from http_door.errors import HttpRefusal, reply_to
from pdserve.service.address import join_address, split_address
from pdserve.service.settings import ConfigError

MAX_HEAD_BYTES = 64 << 10
KEEP_ALIVE_S = 75  # longer than proxies keep their side of an idle connection
_BACKLOG = 2048


class DoorServer:
    """Serves an app at one address.

    stall_s  how long a client may take for a request's head, and leave what is written to it unread
    tls      None = without
    """

    def __init__(
        self, app: ASGIApp, *, stall_s: float, tls: ssl.SSLContext | None, stop_grace_s: float
    ) -> None:
        self.stop_grace_s = stop_grace_s

        class BoundProtocol(_Protocol):
            limit_s = stall_s

        self._config = uvicorn.Config(
            app,
            http=BoundProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",  # what happens is logged where it happens, and garbage not at all
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=max(1, round(stop_grace_s)),
        )
        self._config.load()
        self._config.ssl = tls
        self._server = _Server(self._config)
        self._serving: asyncio.Task[None] | None = None

    def start(self, address: str, setting: str) -> str:
        """Listen on HOST:PORT; returns it with the real port. Raises ConfigError that names the setting."""
        host, port = split_address(address)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.socket(family, socket.SOCK_STREAM)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind((host, port))
            listening.listen(_BACKLOG)
            listening.setblocking(False)
        except OSError as error:
            listening.close()
            raise ConfigError(f"{setting}: can't listen on {address}: {error.strerror or error}") from error
        self._serving = asyncio.create_task(self._server.serve(sockets=[listening]))
        return join_address(host, listening.getsockname()[1])

    async def stop(self) -> None:
        """Take no more connections, and end those that are left within the grace. Idempotent."""
        self._server.should_exit = True
        if self._serving is not None:
            serving, self._serving = self._serving, None
            await serving


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """They are the process's own."""
        yield


class _Protocol(HttpToolsProtocol):
    """A connection whose client can't hold memory, or a place, by being slow."""

    limit_s = 30.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._answered: RequestResponseCycle | None = None  # others may wait behind it
        self._num_head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None  # while a head is expected whole
        self._write_timer: asyncio.TimerHandle | None = None  # while the client doesn't read

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_is_whole()
        self._stop_write_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._head_timer is not None:  # what came earlier didn't make it whole
            if self._num_head_bytes > MAX_HEAD_BYTES:
                self._refuse(431, "the head of the request is too large", limit_bytes=MAX_HEAD_BYTES)
                return
            self._num_head_bytes += len(data)
        super().data_received(data)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._expect_head()

    def on_headers_complete(self) -> None:
        self._head_is_whole()
        super().on_headers_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answered = cycle
        super()._start_asgi_task(cycle, app)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self.loop.call_later(self.limit_s, self.transport.abort)

    def resume_writing(self) -> None:
        self._stop_write_timer()
        super().resume_writing()

    def _expect_head(self) -> None:
        if self._head_timer is None:
            self._num_head_bytes = 0
            self._head_timer = self.loop.call_later(
                self.limit_s,
                lambda: self._refuse(408, "the head of the request came too slowly", limit_s=self.limit_s),
            )

    def _head_is_whole(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "the request isn't HTTP that can be read")

    def _refuse(self, status: int, message: str, **fields: object) -> None:
        """End the connection; with a status, unless that would stand in the middle of an answer."""
        if self.transport.is_closing():
            return
        answered = self._answered
        if answered is None or answered.response_complete or not answered.response_started:
            body = reply_to(HttpRefusal(status, message, param="", code="", **fields)).body
            line = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
            head = f"{line}content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            self.transport.write(head.encode() + body)
        self.transport.close()
