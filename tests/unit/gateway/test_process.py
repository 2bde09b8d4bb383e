"""A gateway's life: what ends it, and what it still does until then."""

from __future__ import annotations

import asyncio
import socket

import pytest
from structlog.testing import capture_logs

from pdserve.client import AsyncClient
from pdserve.gateway.process import serve_with
from pdserve.service.address import split_address
from pdserve.service.config import load
from pdserve.service.settings import ConfigError
from tests.support.http_calls import call
from tests.support.waiting import until
from tests.unit.service.doors import Door, count_to, open_door


class BrokenClient(AsyncClient):
    """Has a bug."""

    async def serving(self) -> bool:
        raise ZeroDivisionError("a bug")


async def never() -> None:
    await asyncio.Event().wait()


async def test_a_watch_that_breaks_ends_the_process() -> None:
    config = load(flags={"http.listen": "127.0.0.1:0", "metrics.listen": "127.0.0.1:0"})
    async with asyncio.timeout(30), BrokenClient("127.0.0.1:9") as client:
        with capture_logs() as logs, pytest.raises(ExceptionGroup) as ended:
            await serve_with(client, config, ["127.0.0.1:9"], never)
    assert ended.group_contains(ZeroDivisionError, match="a bug")
    (at,) = [line["http"] for line in logs if line["event"] == "gateway.listening"]
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(*split_address(at))


async def test_an_address_in_use_is_a_setting_to_change() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        at = f"127.0.0.1:{taken.getsockname()[1]}"
        config = load(flags={"http.listen": at, "metrics.listen": "127.0.0.1:0"})
        async with asyncio.timeout(30), AsyncClient("127.0.0.1:9") as client:
            with pytest.raises(ConfigError, match=at):
                await serve_with(client, config, ["127.0.0.1:9"], never)


async def test_a_gateway_that_was_asked_to_stop_serves_on_for_a_while() -> None:
    """What leads clients to it must see first that it isn't ready."""
    listening = {"http.listen": "127.0.0.1:0", "metrics.listen": "127.0.0.1:0"}
    config = load(flags={**listening, "router.drain_delay_s": 600.0})
    stop = asyncio.Event()

    async def stop_asked() -> None:
        await stop.wait()

    async with asyncio.timeout(30), open_door(Door(count_to)) as (address, _), AsyncClient(address) as client:
        with capture_logs() as logs:
            serving = asyncio.create_task(serve_with(client, config, [address], stop_asked))

            async def said(event: str) -> str | None:
                return next((line.get("http", event) for line in logs if line["event"] == event), None)

            at = await until("it listens", lambda: said("gateway.listening"))
            await until("it is ready", lambda: said("gateway.serving"))
            stop.set()
            await until("it waits", lambda: said("gateway.still_serving"))
        health = await call(at, "/health")
        assert (health.status, health.body) == (503, b"asked to stop\n")
        assert (await call(at, "/v1/models")).status == 200
        serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await serving
