"""uvicorn in our process: on our loop, by our signals and our drain, with bounds on what a connection may hold."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

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
                self._refuse(b"431 Request Header Fields Too Large")
                return
            self._num_head_bytes += len(data)
        super().data_received(data)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._expect_head()

    def on_headers_complete(self) -> None:
        self._head_is_whole()
        super().on_headers_complete()

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
                self.limit_s, lambda: self._refuse(b"408 Request Timeout")
            )

    def _head_is_whole(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _refuse(self, status: bytes) -> None:
        if not self.transport.is_closing():
            self.transport.write(
                b"HTTP/1.1 " + status + b"\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
            )
            self.transport.close()
