"""Keeping TCP addresses for children that aren't there yet, or are just being restarted."""

from __future__ import annotations

import socket
from types import TracebackType
from typing import Self

from pdserve.service.address import join_address
from pdserve.service.settings import ConfigError

_LAST_PORT = 65535


class PortReservations:
    """Holds ports by sockets that are bound but don't listen; the children listen on the same addresses.

    With SO_REUSEADDR a second socket may bind such a port and listen, while the kernel gives it to nobody who asks
    for any free port. So addresses are known before the first child starts and stay the same over restarts.
    """

    def __init__(self) -> None:
        self._held: list[socket.socket] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    def reserve(self, host: str, port: int) -> int:
        """Hold host:port, or a free port of host for 0; the port. Raises ConfigError when it can't be had."""
        address = join_address(host, port)
        if port > _LAST_PORT:  # the resolver would take the rest of a division
            raise ConfigError(f"can't listen on {address}: {_LAST_PORT} is the last port")
        try:
            family, kind, protocol, _, resolved = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            held = socket.socket(family, kind, protocol)
        except OSError as error:
            raise ConfigError(f"can't listen on {address}: {error.strerror}") from error
        try:
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.bind(resolved)
        except OSError as error:
            held.close()
            raise ConfigError(f"can't listen on {address}: {error.strerror}") from error
        self._held.append(held)
        return int(held.getsockname()[1])

    def close(self) -> None:
        """Let go of all; idempotent."""
        for held in self._held:
            held.close()
        self._held.clear()
