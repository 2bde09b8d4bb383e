"""A gateway's backend: when it serves, when it refuses, and what it remembers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from http_door.port import Call, Purpose
from pdserve.client import AsyncClient
from pdserve.errors import Draining, InvalidRequest, NoWorker, Unauthenticated
from pdserve.gateway.backend import SPELLED_FOR_S, Gateway, SpelledTokens
from tests.support.virtual_clock import VirtualClock
from tests.unit.service.doors import Door, count_to, open_door

CALL = Call(Purpose.TEXT)


class LockedDoor(Door):
    """Tells its status to nobody while it asks for keys; counts who wants to know how tokens are written."""

    asks_for_keys = True
    num_asked = 0

    async def GetStatus(self, request: Any, context: Any) -> Any:  # noqa: N802
        if self.asks_for_keys:
            raise Unauthenticated("no valid API key")
        return await super().GetStatus(request, context)

    async def Detokenize(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.num_asked += 1
        return await super().Detokenize(request, context)


@contextlib.asynccontextmanager
async def gateway_to(door: Door, *, must_ask_for_keys: bool = False) -> AsyncIterator[Gateway]:
    async with asyncio.timeout(30), open_door(door) as (address, _), AsyncClient(address) as client:
        yield Gateway(client, VirtualClock(), CollectorRegistry(), must_ask_for_keys=must_ask_for_keys)


def serves(gateway: Gateway) -> bool:
    try:
        with gateway.visit(CALL):
            return True
    except NoWorker:
        return False


async def test_it_is_ready_when_a_router_has_said_so() -> None:
    async with gateway_to(Door(count_to)) as gateway:
        assert gateway.not_ready() == ("no router has answered yet",)
        await gateway.look()
        assert gateway.not_ready() == () and serves(gateway)


async def test_it_serves_strangers_only_while_routers_ask_for_keys() -> None:
    async with gateway_to(door := LockedDoor(count_to), must_ask_for_keys=True) as gateway:
        assert not serves(gateway), "nobody knows yet whether they ask"
        await gateway.look()
        assert serves(gateway) and gateway.not_ready() == ()
        door.asks_for_keys = False
        await gateway.look()
        assert not serves(gateway) and "ask nobody for a key" in gateway.not_ready()[0]
        door.asks_for_keys = True
        await gateway.look()
        assert serves(gateway) and gateway.not_ready() == ()


async def test_a_lost_router_closes_nothing_that_was_found_locked() -> None:
    async with AsyncClient("127.0.0.1:9") as client:  # nobody is there
        gateway = Gateway(client, VirtualClock(), CollectorRegistry(), must_ask_for_keys=True)
        await gateway.look()
        assert not serves(gateway) and "127.0.0.1:9" in gateway.not_ready()[0]
    door = open_door(LockedDoor(count_to))
    async with asyncio.timeout(30), door as (address, server), AsyncClient(address) as client:
        gateway = Gateway(client, VirtualClock(), CollectorRegistry(), must_ask_for_keys=True)
        await gateway.look()
        await server.stop(None)
        await gateway.look()
        assert gateway.not_ready() and serves(gateway), "each request finds out itself who is there"


async def test_what_leads_clients_to_it_learns_of_its_end_before_it_refuses_anybody() -> None:
    async with gateway_to(Door(count_to)) as gateway:
        await gateway.look()
        gateway.announce_end()
        assert gateway.not_ready() == ("asked to stop",) and serves(gateway)
        gateway.drain()
        assert gateway.not_ready() == ("draining",)
        with pytest.raises(Draining), gateway.visit(CALL):
            pass


async def test_how_tokens_are_written_is_asked_once_and_again_when_another_model_may_be_served() -> None:
    clock = VirtualClock()
    spelled = SpelledTokens(clock)
    door = LockedDoor(count_to)
    async with open_door(door) as (address, _), AsyncClient(address) as client:
        assert await spelled.get([97, 98, 97], client) == [b"a", b"b", b"a"]
        assert await spelled.get([98, 99], client) == [b"b", b"c"]
        assert await spelled.get([97, 99], client) == [b"a", b"c"]
        assert door.num_asked == 2
        clock.advance(SPELLED_FOR_S + 1)
        assert await spelled.get([97], client) == [b"a"]
        assert door.num_asked == 3


@pytest.mark.parametrize("key", ["Bearer \xe9", "Bearer \x01", "Bearer " + "x" * 60_000])
async def test_a_key_that_can_be_none_is_refused_here(key: str) -> None:
    async with gateway_to(Door(count_to)) as gateway:
        with (
            pytest.raises(Unauthenticated, match="no valid API key"),
            gateway.visit(Call(Purpose.TEXT, (("authorization", key),))),
        ):
            pass
        with pytest.raises(InvalidRequest, match="printable ASCII"):
            gateway.client.with_metadata([("traceparent", "\xe9")])
