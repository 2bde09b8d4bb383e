"""The gateway as a process: an HTTP door in front of routers, signals, drain, exit code."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable, Sequence

import structlog
import uvloop
from prometheus_client import CollectorRegistry

from http_door.opening import OpenDoor, open_door
from pdserve.client import AsyncClient, ClientTls
from pdserve.clock import SystemClock
from pdserve.gateway.backend import Gateway
from pdserve.ids import system_random
from pdserve.malloc import share_one_heap
from pdserve.service.address import is_loopback
from pdserve.service.config import Config
from pdserve.service.exposure import check_gateway
from pdserve.service.http import HttpServer
from pdserve.service.lifecycle import EXIT_OK, StopSignals
from pdserve.service.logs import set_up_logs
from pdserve.service.loop_stack import LoopStack
from pdserve.service.loop_watch import LoopWatch
from pdserve.service.receiving import Receiving, count_of_refused, most_at_once

log = structlog.get_logger()

STOP_GRACE_S = 2.0


def serve(config: Config, targets: Sequence[str], tls: ClientTls | None) -> int:
    """Run a gateway on a loop of its own until a signal; returns the exit code. Main thread. Raises ConfigError.

    tls  towards the routers; None = without
    """
    share_one_heap()
    gc.freeze()  # what was imported: else each look for cycles walks it
    return uvloop.run(run_gateway(config, targets, tls))


async def run_gateway(config: Config, targets: Sequence[str], tls: ClientTls | None) -> int:
    """Serve until SIGTERM or SIGINT, then drain. Returns the exit code; raises ConfigError if it can't listen."""
    set_up_logs(config.log, role="gateway")
    for setting in check_gateway(config):
        log.warning("listener.insecure", setting=setting)
    async with StopSignals() as stop, AsyncClient(targets, tls=tls, shares_calls=True) as client:
        await serve_with(client, config, targets, stop.wait)
    return EXIT_OK


async def serve_with(
    client: AsyncClient, config: Config, routers: Sequence[str], stop_asked: Callable[[], Awaitable[None]]
) -> None:
    """A door in front of a client's routers, from listening to the end of the drain.

    Raises ConfigError if it can't listen, and what ended the watch over the routers: without it nobody knows whether
    requests may be served.
    """
    clock, registry = SystemClock(), CollectorRegistry()
    http = config.http
    must_ask = not is_loopback(http.listen) and not config.cluster.insecure
    loop_watch = LoopWatch(registry, clock, clock.cpu_s, LoopStack(clock))
    gateway = Gateway(client, clock, registry, must_ask_for_keys=must_ask)
    machines = HttpServer(registry, lambda: (), gateway.not_ready)
    metrics_address = await machines.start(config.metrics.listen)
    loop_watch.start()
    try:
        door = open_door(
            gateway,
            config,
            http.listen,
            clock=clock,
            random=system_random(),
            registry=registry,
            receiving=Receiving(
                most_at_once(config, http.max_body_bytes), clock, count_of_refused(registry).inc
            ),
            stop_grace_s=STOP_GRACE_S,
        )
        try:
            async with asyncio.TaskGroup() as tasks:
                watching = tasks.create_task(gateway.watch())
                log.info(
                    "gateway.listening", http=door.address, routers=list(routers), metrics=metrics_address
                )
                await stop_asked()
                await _drain(gateway, door, config)
                watching.cancel()
        finally:
            await door.stop()
    finally:
        loop_watch.stop()
        machines.close()


async def _drain(gateway: Gateway, door: OpenDoor, config: Config) -> None:
    gateway.announce_end()
    if delay_s := config.router.drain_delay_s:
        log.info("gateway.still_serving", drain_delay_s=delay_s)
        await asyncio.sleep(delay_s)
    gateway.drain()
    await door.drain(config.timeouts.drain_s)
    log.info("gateway.drained")
