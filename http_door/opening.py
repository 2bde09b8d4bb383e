"""Puts a door together and opens it: for a router and for a gateway alike."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from http_door.app import Door, make_app
from http_door.metrics import HttpMetrics
from http_door.port import Backend
from http_door.server import DoorServer
from pdserve.clock import Clock
from pdserve.ids import Random
from pdserve.service.config import Config
from pdserve.service.receiving import Receiving
from pdserve.service.tls import server_context


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
) -> tuple[DoorServer, str]:
    """Listen at HOST:PORT; returns the server, and the address with its real port. On the event loop.

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
    )
    server = DoorServer(
        make_app(door),
        stall_s=config.timeouts.client_stall_s,
        tls=server_context(config.tls, config.tls.client_ca_file),
        stop_grace_s=stop_grace_s,
    )
    return server, server.start(address, "http.listen")
