"""Leader election in virtual time: one leads, the next one follows, nobody leads twice."""

from __future__ import annotations

import copy
from typing import Any

import aiohttp

from deploy.k8s.operator.api import ApiError
from deploy.k8s.operator.lease import DURATION_S, RENEW_S, Leadership
from tests.support.virtual_clock import VirtualClock


class LeaseStore:
    """One Lease, with the conflicts of an API server. broken: nobody reaches it."""

    def __init__(self) -> None:
        self.lease: dict[str, Any] | None = None
        self.version = 0
        self.broken = False

    async def get(self, api: str, kind: str, namespace: str, name: str) -> dict[str, Any] | None:
        self._check()
        return copy.deepcopy(self.lease)

    async def create(self, manifest: dict[str, Any]) -> dict[str, Any]:
        self._check()
        if self.lease is not None:
            raise ApiError(409, "exists")
        return self._put(manifest)

    async def replace(self, manifest: dict[str, Any]) -> dict[str, Any]:
        self._check()
        if manifest["metadata"]["resourceVersion"] != str(self.version):
            raise ApiError(409, "changed")
        return self._put(manifest)

    def _check(self) -> None:
        if self.broken:
            raise aiohttp.ClientConnectionError

    def _put(self, manifest: dict[str, Any]) -> dict[str, Any]:
        self.version += 1
        metadata = {**manifest["metadata"], "resourceVersion": str(self.version)}
        self.lease = {**copy.deepcopy(manifest), "metadata": metadata}
        return self.lease


class World:
    def __init__(self) -> None:
        self.store = LeaseStore()
        self.clock = VirtualClock()

    def candidate(self, name: str) -> Leadership:
        async def pause(seconds: float) -> None:
            self.clock.advance(seconds)

        return Leadership(self.store, "ns", "lease", name, self.clock, pause)

    def after(self, seconds: float) -> Any:
        end_s = self.clock.now_s() + seconds
        return lambda: self.clock.now_s() >= end_s


async def test_the_second_leads_when_the_first_gives_it_up() -> None:
    world = World()
    first, second = world.candidate("a"), world.candidate("b")
    assert await first.acquire(world.after(60))
    assert not await second.acquire(world.after(DURATION_S / 2))
    await first.release()
    assert not first.held
    assert await second.acquire(world.after(3))
    assert world.store.lease is not None and world.store.lease["spec"]["leaseTransitions"] == 1


async def test_the_second_leads_when_the_first_is_silent_for_long_enough() -> None:
    world = World()
    assert await world.candidate("a").acquire(world.after(60))
    second = world.candidate("b")
    began_s = world.clock.now_s()
    assert await second.acquire(world.after(120))
    assert world.clock.now_s() - began_s > DURATION_S


async def test_who_renews_keeps_it() -> None:
    world = World()
    first, second = world.candidate("a"), world.candidate("b")
    assert await first.acquire(world.after(60))
    for _ in range(10):
        await first.keep(world.after(RENEW_S + 0.1))
        assert first.held
        assert not await second.acquire(world.after(0.1))


async def test_who_cant_renew_stops_before_another_may_lead() -> None:
    world = World()
    first = world.candidate("a")
    assert await first.acquire(world.after(60))
    began_s = world.clock.now_s()
    world.store.broken = True
    await first.keep(world.after(600))
    assert not first.held
    assert world.clock.now_s() - began_s < DURATION_S


async def test_who_finds_another_leader_stops_at_once() -> None:
    world = World()
    first = world.candidate("a")
    assert await first.acquire(world.after(60))
    assert world.store.lease is not None
    world.store.lease["spec"]["holderIdentity"] = "b"
    world.store.version += 1
    world.store.lease["metadata"]["resourceVersion"] = str(world.store.version)
    await first.keep(world.after(600))
    assert not first.held
