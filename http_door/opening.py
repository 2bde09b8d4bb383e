"""Puts a door together and opens it: for a router and for a gateway alike."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from http_door.app import Door, make_app
from http_door.metrics import HttpMetrics
from http_door.page.serving import shows_page
from http_door.port import Backend
from http_door.server import DoorServer
from http_door.styles import KnownStyles
from pdserve.clock import Clock
from pdserve.errors import Draining
from pdserve.ids import Random
from pdserve.service.config import Config
from pdserve.service.receiving import Receiving
from pdserve.service.tls import server_context


class OpenDoor:
    """A door that is open. address: HOST:PORT, with its real port."""

    def __init__(self, door: Door, server: DoorServer, address: str) -> None:
        self._door = door
        self._server = server
        self.address = server.start(address, "http.listen")

    async def drain(self, limit_s: float) -> None:
        """Return when all calls have ended; those that are left after limit_s are ended UNAVAILABLE."""
        if not await self._door.open.none_left(limit_s):
            self._door.open.end_by(Draining("this process ends: send the request again"))
            await self._door.open.none_left(self._server.stop_grace_s)

    async def stop(self) -> None:
        """Take no more connections and end what is left."""
        await self._server.stop()


def open_door(
    backend: Backend,
    config: Config,
    address: str,
    *,
    clock: Clock,
    random: Random,
    registry: CollectorRegistry,
    receiving: Receiving,
    stop_grace_s: float,
) -> OpenDoor:
    """Listen at HOST:PORT. On the event loop.

    receiving  where bodies come in
    Raises ConfigError for an address or TLS files that can't be used.
    """
    door = Door(
        backend=backend,
        config=config,
        clock=clock,
        random=random,
        metrics=HttpMetrics(registry),
        receiving=receiving,
        begun_s=clock.wall_ns() // 1_000_000_000,
        styles=KnownStyles(config.http, clock, config.router.max_reading_bytes),
        shows_page=shows_page(config, address),
    )
    server = DoorServer(
        make_app(door),
        stall_s=config.timeouts.client_stall_s,
        tls=server_context(config.tls, config.tls.client_ca_file),
        stop_grace_s=stop_grace_s,
    )
    return OpenDoor(door, server, address)
