"""The keeper over hosts that are told what to do, on a virtual clock."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import pytest

from deploy.ray.host import HostReport, Prepared, ProcessEnd
from deploy.ray.keeper import Keeper, KeptState
from deploy.ray.ports import Host, HostLost
from deploy.ray.spec import SECRET, RayCluster, role_of, shipped_settings
from pdserve.service.config import Config, EngineConfig
from pdserve.service.settings import ConfigError
from tests.support.virtual_clock import VirtualClock
from tests.support.virtual_loop import run_virtual

SETTINGS = shipped_settings(Config(engine=EngineConfig(kind="fake")))
RESOURCES: dict[str, dict[str, float]] = {"router": {}, "prefill": {"CPU": 1}, "decode": {"CPU": 1}}


def a_cluster(**counts: int) -> RayCluster:
    merged = {"router": 1, "prefill": 1, "decode": 1, **counts}
    return RayCluster(
        name="c",
        members={role: list(range(count)) for role, count in merged.items()},
        ranges={role: (count, count) for role, count in merged.items()},
        settings=SETTINGS,
        resources=RESOURCES,
    )


@dataclass
class FakeHost:
    """Its process is ready start_s after it was placed, which takes place_s, and runs until `end`; `lost` is what every
    call raises.
    """

    process: str
    number: int
    pid: int = 0
    is_silent: bool = False
    lost: str = ""
    ended: asyncio.Future[ProcessEnd] | None = None
    routers: Sequence[str] = ()
    was_drained: bool = False
    died: asyncio.Event = field(default_factory=asyncio.Event)
    place_s: float = 0.0
    start_s: float = 0.0
    started_s: float = 0.0

    async def _answer(self, wanted: Callable[[], Awaitable[Any]]) -> Any:
        if self.is_silent:
            await asyncio.Event().wait()
        if self.lost:
            raise HostLost(self.lost)
        work, died = asyncio.ensure_future(wanted()), asyncio.create_task(self.died.wait())
        try:
            await asyncio.wait({work, died}, return_when=asyncio.FIRST_COMPLETED)
            if self.lost:
                raise HostLost(self.lost)
            return work.result()
        finally:
            for task in (work, died):
                task.cancel()
            await asyncio.gather(work, died, return_exceptions=True)

    async def prepare(self, cluster: RayCluster, process: str, routers: Sequence[str]) -> Prepared:
        async def prepared() -> Prepared:
            await asyncio.sleep(self.place_s)
            self.routers = routers
            operators = f"10.0.0.{self.number}:2" if role_of(process) == "router" else ""
            return Prepared(
                node=f"10.0.0.{self.number}", metrics="m:1", target=operators, operators=operators
            )

        return await self._answer(prepared)  # type: ignore[no-any-return]

    async def run(self) -> ProcessEnd:
        async def ran() -> ProcessEnd:
            if self.ended is None or self.ended.done():
                self.pid += 1
                self.started_s = asyncio.get_running_loop().time()
                self.ended = asyncio.get_running_loop().create_future()
            return await asyncio.shield(self.ended)

        return await self._answer(ran)  # type: ignore[no-any-return]

    async def report(self) -> HostReport:
        async def reported() -> HostReport:
            is_ready = asyncio.get_running_loop().time() >= self.started_s + self.start_s
            lacks = None if is_ready else "it begins"
            return HostReport(host_pid=self.number, pid=self.pid, lacks=lacks, pairs_up=1)

        return await self._answer(reported)  # type: ignore[no-any-return]

    async def set_routers(self, routers: Sequence[str]) -> None:
        self.routers = routers

    async def drain(self, limit_s: float) -> ProcessEnd | None:
        self.was_drained = True
        self.end(0)
        return None

    def end(self, code: int, last_line: str = "", ready_s: float | None = 20.0) -> None:
        assert self.ended is not None
        self.ended.set_result(ProcessEnd(code=code, ready_s=ready_s, last_line=last_line))

    def die(self) -> None:
        self.lost = "it was killed"
        self.died.set()


class FakeHosts:
    """Also the store: what outlives a keeper. new: what happens to a host when it is made."""

    def __init__(self) -> None:
        self.living: dict[str, FakeHost] = {}
        self.made: list[FakeHost] = []
        self.ended: list[str] = []
        self.kept: RayCluster | None = None
        self.reserved: set[str] | None = None
        self.new: Callable[[FakeHost], None] = lambda host: None

    async def names(self) -> set[str]:
        return set(self.living)

    async def find(self, process: str) -> Host | None:
        return self.living.get(process)

    async def find_or_create(self, process: str, cluster: RayCluster) -> Host:
        if process not in self.living:
            self.living[process] = FakeHost(process, len(self.made) + 1)
            self.made.append(self.living[process])
            self.new(self.living[process])
        return self.living[process]

    async def end(self, process: str) -> None:
        if self.living.pop(process, None) is not None:
            self.ended.append(process)

    async def reserve(self, cluster: RayCluster | None, used: Collection[str]) -> None:
        self.reserved = set(used)

    async def load(self) -> RayCluster | None:
        return self.kept

    async def save(self, cluster: RayCluster) -> None:
        self.kept = cluster

    async def delete(self) -> None:
        self.kept = None


class Kept:
    """A keeper that runs, and what it keeps."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self.hosts = FakeHosts()
        self.start()

    def start(self) -> None:
        """A first one, or one after its death."""
        self.keeper = Keeper(self.hosts, self.hosts, self.clock, Random(1))
        self.task = asyncio.create_task(self.keeper.run())

    async def kill(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    async def passes(self, s: float = 2.0) -> KeptState:
        """Let time pass; how everything is then."""
        await asyncio.sleep(s)
        state = await self.keeper.state()
        assert state is not None
        return state


def kept(test: Callable[[Kept], Awaitable[None]]) -> None:
    """Run a test with a keeper; nothing of it may be left."""
    clock = VirtualClock()

    async def run() -> None:
        it = Kept(clock)
        try:
            await test(it)
        finally:
            await it.kill()

    run_virtual(run(), clock)


def states(state: KeptState) -> dict[str, str]:
    return {each.id: each.state for each in state.processes}


def test_up_places_every_process_and_a_second_one_changes_nothing() -> None:
    async def run(it: Kept) -> None:
        assert await it.keeper.up(a_cluster(decode=2)) == []
        state = await it.passes()
        assert states(state) == dict.fromkeys(("router-0", "prefill-0", "decode-0", "decode-1"), "ready")
        assert state.is_served
        for worker in ("prefill-0", "decode-0", "decode-1"):
            assert tuple(it.hosts.living[worker].routers) == ("10.0.0.1:2",)
        assert it.hosts.kept is not None and len(it.hosts.kept.files[SECRET]) >= 32
        secret = it.hosts.kept.files[SECRET]
        assert await it.keeper.up(a_cluster(decode=2)) == []
        await it.passes()
        assert len(it.hosts.made) == 4 and it.hosts.kept.files[SECRET] == secret

    kept(run)


def test_a_cluster_with_other_settings_is_refused_with_what_differs() -> None:
    async def run(it: Kept) -> None:
        await it.keeper.up(a_cluster())
        other = replace(a_cluster(decode=3), settings={**SETTINGS, "engine.block_size": 32})
        assert await it.keeper.up(other) == ["engine.block_size is 16, asked for 32"]
        own_secret = replace(a_cluster(), files={SECRET: b"x" * 40})
        assert await it.keeper.up(own_secret) == ["cluster.secret_file has another content"]
        assert "x" * 40 not in repr(own_secret)
        assert (await it.passes()).counts["decode"] == 1

    kept(run)


def test_a_process_that_ends_is_started_again_by_the_same_host() -> None:
    async def run(it: Kept) -> None:
        await it.keeper.up(a_cluster())
        await it.passes()
        host = it.hosts.living["decode-0"]
        host.end(-9)
        state = await it.passes()
        assert states(state)["decode-0"] == "ready" and host.pid == 2
        assert len(it.hosts.made) == 3

    kept(run)


@pytest.mark.parametrize("how", ["dies", "is silent"])
def test_a_host_that_is_lost_is_replaced(how: str) -> None:
    async def run(it: Kept) -> None:
        await it.keeper.up(a_cluster())
        await it.passes()
        host = it.hosts.living["decode-0"]
        if how == "dies":
            host.die()
        else:
            host.is_silent = True
        state = await it.passes(12)
        assert states(state)["decode-0"] == "ready"
        assert it.hosts.living["decode-0"] is not host
        assert it.hosts.ended == ["decode-0"]

    kept(run)


@pytest.mark.parametrize("process", ["router-0", "decode-0"])
@pytest.mark.parametrize("how", ["its process ends", "its host dies", "its host is silent"])
def test_what_ended_is_back_within_20_s(how: str, process: str) -> None:
    """Where Ray takes 5 s to place a host, and the process 4 s to start: more than was seen on a busy machine."""

    def slow(host: FakeHost) -> None:
        host.place_s, host.start_s = 5.0, 4.0

    async def run(it: Kept) -> None:
        it.hosts.new = slow
        await it.keeper.up(a_cluster())
        await it.passes(40)
        host = it.hosts.living[process]
        match how:
            case "its process ends":
                host.end(-9)
            case "its host dies":
                host.die()
            case _:
                host.is_silent = True
        assert states(await it.passes(1))[process] != "ready" or how == "its host is silent"
        state = await it.passes(19)
        assert states(state)[process] == "ready"
        assert (it.hosts.living[process] is host) == (how == "its process ends")

    kept(run)


def test_workers_are_told_where_a_router_has_moved() -> None:
    async def run(it: Kept) -> None:
        await it.keeper.up(a_cluster())
        await it.passes()
        it.hosts.living["router-0"].die()
        await it.passes(5)
        moved = it.hosts.living["router-0"].number
        assert moved == 4
        for worker in ("prefill-0", "decode-0"):
            assert tuple(it.hosts.living[worker].routers) == (f"10.0.0.{moved}:2",)

    kept(run)


def test_a_keeper_that_comes_back_finds_its_hosts_and_drains_those_that_are_too_many() -> None:
    async def run(it: Kept) -> None:
        await it.keeper.up(a_cluster(decode=3))
        await it.passes()
        await it.kill()
        assert it.hosts.kept is not None
        it.hosts.kept = it.hosts.kept.asked({"decode": (2, 2)})
        leaves = it.hosts.living["decode-2"]
        it.start()
        first = await it.keeper.state()
        assert first is not None and first.counts["decode"] == 2
        assert first.targets == ("10.0.0.1:2",)
        state = await it.passes()
        assert sorted(states(state)) == ["decode-0", "decode-1", "prefill-0", "router-0"]
        assert leaves.was_drained and it.hosts.ended == ["decode-2"]
        assert len(it.hosts.made) == 5 and all(host.pid == 1 for host in it.hosts.made)

    kept(run)


def test_what_can_never_start_is_given_up_and_tried_again_when_it_is_asked_for_again() -> None:
    async def run(it: Kept) -> None:
        await it.keeper.up(a_cluster())
        await it.passes()
        it.hosts.living["decode-0"].end(2, "error: no such model", ready_s=None)
        state = await it.passes(60)
        row = next(each for each in state.processes if each.id == "decode-0")
        assert row.state == "failed"
        assert row.why == "ended with exit code 2: it can't start with these settings; it said: no such model"
        await it.keeper.up(a_cluster())
        assert states(await it.passes())["decode-0"] == "ready"

    kept(run)


def test_down_drains_routers_first_and_leaves_nothing() -> None:
    async def run(it: Kept) -> None:
        await it.keeper.up(a_cluster())
        await it.passes()
        await it.keeper.down()
        await asyncio.wait_for(it.task, 60)
        assert it.hosts.ended[0] == "router-0" and len(it.hosts.ended) == 3
        assert all(host.was_drained for host in it.hosts.made)
        assert it.hosts.kept is None and it.hosts.reserved == set() and not it.hosts.living

    kept(run)


def test_a_host_without_a_place_is_ended_without_a_drain() -> None:
    async def run(it: Kept) -> None:
        it.hosts.new = lambda host: setattr(host, "is_silent", host.process == "decode-1")
        await it.keeper.up(a_cluster(decode=2))
        assert states(await it.passes(100))["decode-1"] == "placing"
        await it.keeper.scale({"decode": (1, 1)})
        assert "decode-1" not in states(await it.passes())
        assert it.hosts.ended == ["decode-1"]

    kept(run)


def test_a_shape_that_could_not_serve_is_refused() -> None:
    async def run(it: Kept) -> None:
        await it.keeper.up(a_cluster())
        with pytest.raises(ConfigError, match="no worker would decode"):
            await it.keeper.scale({"decode": (0, 0)})
        assert (await it.passes()).counts["decode"] == 1

    kept(run)
