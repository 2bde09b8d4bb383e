"""The routers that a client may ask: one connection each, and the next one where one doesn't answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import grpc.aio

from pdserve.errors import InvalidRequest
from pdserve.fields import plain_header
from pdserve.request import Resume
from pdserve.service.rpc import open_channel
from pdserve.service.rpc_errors import ServerLost, error_of
from pdserve.service.tls import ClientTls

T = TypeVar("T")


class RouterLost(ServerLost):
    """No router answers any longer; `resume` is what a later request can go on from, if anything had come."""

    resume: Resume | None = None


class Targets:
    """One event loop.

    addresses  HOST:PORT, or several of them
    api_key    said with each call, if the routers ask for one
    tls        None = without
    """

    def __init__(
        self,
        addresses: str | Sequence[str],
        keepalive_s: float,
        api_key: str = "",
        tls: ClientTls | None = None,
    ) -> None:
        self._addresses = (addresses,) if isinstance(addresses, str) else tuple(addresses)
        if not self._addresses:
            raise ValueError("a client needs at least one target")
        self._keepalive_s = keepalive_s
        self._tls = tls
        self.metadata: tuple[tuple[str, str], ...] = ()
        if api_key:
            if not plain_header(api_key):
                raise InvalidRequest("an API key is printable ASCII")
            self.metadata = (("authorization", f"Bearer {api_key}"),)
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._current = 0

    def __len__(self) -> int:
        return len(self._addresses)

    @property
    def current(self) -> str:
        """The one that answered last."""
        return self._addresses[self._current]

    def leave(self, target: str) -> None:
        """It doesn't answer. Of many calls that lose one router together only the first moves on to the next."""
        if target == self.current:
            self._current = (self._current + 1) % len(self._addresses)

    def channel(self, target: str) -> grpc.aio.Channel:
        """The connection to one; made when it is first asked for."""
        channel = self._channels.get(target)
        if channel is None:
            channel = self._channels[target] = open_channel(
                target, keepalive_s=self._keepalive_s, tls=self._tls
            )
        return channel

    async def ask(self, call: Callable[[str], Awaitable[T]]) -> T:
        """Each in turn until one answers. Raises RouterLost if none does, else what the answer says."""
        for num_tried in range(1, len(self) + 1):
            target = self.current
            try:
                return await call(target)
            except grpc.aio.AioRpcError as error:
                told = error_of(error, target)
                if not isinstance(told, ServerLost):
                    raise told from None
            except ServerLost as error:
                told = error
            self.leave(target)
            if num_tried == len(self):
                raise RouterLost(told.message, **told.fields) from None
        raise AssertionError("there is at least one")

    async def close(self) -> None:
        """End all calls and connections; idempotent."""
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            await channel.close(None)
