"""On three Ray nodes, under load: whatever ends comes back, no request fails, and nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from random import Random

import pytest
import pytest_asyncio

from deploy.ray.client import RayDriver, joined
from deploy.ray.keeper import KeptState, ProcessState
from pdserve.client import AsyncClient
from pdserve.clock import SystemClock
from pdserve.service.lifecycle import EXIT_SUPERSEDED
from tests.support.asking import at_rest, status_of
from tests.support.load import SteadyLoad
from tests.support.pids import exit_code_of_zombie, wait_gone
from tests.support.processes import run_cli
from tests.support.ray_cluster import RayNodes, ray_nodes
from tests.support.waiting import until

NAME = "loaded"
LIMIT_S = 100.0  # of anything to come back; how long it took is printed
NODE = {"prefill": 8.0, "decode": 8.0, "router": 8.0, "CPU": 32.0}
FLAGS = ("--engine", "fake", "--engine.num-blocks", "2048", "--timeouts.worker-wait-s", "90",
         "--timeouts.drain-s", "20", "--scaling.cool-down-down-s", "3", "--itl-target", "0.0001")  # fmt: skip

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(280),
    pytest.mark.asyncio(loop_scope="module"),
]


@dataclass
class OnRay:
    """The cluster as the tests see it."""

    nodes: RayNodes
    driver: RayDriver
    state: KeptState

    def targets(self) -> tuple[str, ...]:
        """Of the routers, as of the last look."""
        return self.state.targets

    def process(self, id: str) -> ProcessState:
        return next(each for each in self.state.processes if each.id == id)

    async def look(self) -> KeptState:
        """How it is now; the last known, while its keeper is being started again."""
        self.state = await asyncio.to_thread(self.driver.state)
        return self.state

    async def when(self, what: str, holds: Callable[[KeptState], bool]) -> None:
        """Wait for it, and say how long it took."""
        clock = SystemClock()
        since_s = clock.now_s()

        async def has_come() -> bool:
            return holds(await self.look())

        await until(what, has_come, limit_s=LIMIT_S, told=lambda: str(self.state))
        print(f"{what}: {clock.now_s() - since_s:.1f} s")

    async def whole(self) -> None:
        """All processes are ready, and every router knows all workers."""

        def are_ready(state: KeptState) -> bool:
            has = Counter(each.role for each in state.processes if each.state == "ready")
            return has == Counter(state.counts) and has.total() == len(state.processes)

        await self.when("all are ready", are_ready)
        workers = sorted(each.id for each in self.state.processes if each.role != "router")
        for target in self.targets():
            async with AsyncClient(target) as client:

                async def knows_all(client: AsyncClient = client) -> bool:
                    status = await status_of(client)
                    up = [each.id for each in status.workers if each.state == "up"] if status else []
                    return sorted(up) == workers

                await until(f"{target} knows {workers}", knows_all, limit_s=LIMIT_S)

    @contextlib.asynccontextmanager
    async def loaded(self) -> AsyncIterator[SteadyLoad]:
        """Under load from before the block to a while after it; afterwards no worker holds anything."""
        load = SteadyLoad(self.targets, Random(NAME), num_clients=4, max_tokens=400)
        async with load:
            await load.answers()
            yield load
            await self.whole()
            await load.answers()
        workers = [each.id for each in self.state.processes if each.role != "router"]
        async with AsyncClient(self.targets()[0]) as client:
            await at_rest(client, workers)

    async def returns(self, before: ProcessState, *, on_another_host: bool) -> ProcessState:
        """The process, once it is ready again as another one."""

        def is_back(state: KeptState) -> bool:
            now = next(each for each in state.processes if each.id == before.id)
            return now.state == "ready" and now.pid != before.pid

        await self.when(f"{before.id} is back", is_back)
        now = self.process(before.id)
        assert (now.host_pid != before.host_pid) == on_another_host
        return now


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def on_ray() -> AsyncIterator[OnRay]:
    """Two routers, two prefill workers and a decode worker, on any of three nodes."""
    async with ray_nodes(NODE, NODE, CPU=0) as nodes:
        up = await asyncio.to_thread(
            run_cli, "ray", "up", "--address", nodes.address, "--name", NAME,
            "--routers", "2", "--prefill", "2", "--decode", "1", *FLAGS, limit_s=200,
        )  # fmt: skip
        assert up.returncode == 0, up.stderr
        with joined(nodes.address):  # the driver that started it is gone
            driver = RayDriver(NAME, SystemClock(), print)
            found = OnRay(nodes, driver, await asyncio.to_thread(driver.state))
            await found.whole()
            yield found


async def test_a_pair_that_shares_memory_lies_on_one_node(on_ray: OnRay) -> None:
    raylets = {on_ray.nodes.raylet_of(on_ray.process(id).host_pid or 0) for id in ("prefill-0", "decode-0")}
    assert len(raylets) == 1


async def test_more_decode_workers_and_fewer(on_ray: OnRay) -> None:
    async with on_ray.loaded() as load:
        await asyncio.to_thread(on_ray.driver.scale, {"decode": (3, 3)})
        await on_ray.when("3 are wanted", lambda state: state.counts["decode"] == 3)
        await on_ray.whole()
        await load.answers("decode-2", 1)
        leaves = on_ray.process("decode-2")
        await asyncio.to_thread(on_ray.driver.scale, {"decode": (2, 2)})
        assert leaves.pid is not None and leaves.host_pid is not None
        await wait_gone(leaves.pid, LIMIT_S)
        await wait_gone(leaves.host_pid, LIMIT_S)
        await on_ray.when("2 are left", lambda state: len(state.processes) == 6)


async def test_the_number_of_workers_follows_the_load(on_ray: OnRay) -> None:
    """A step of any size is more than the target of 0.1 ms, and none is less."""
    await asyncio.to_thread(on_ray.driver.scale, {"decode": (1, 3)})
    async with SteadyLoad(on_ray.targets, Random(NAME), num_clients=4, max_tokens=400) as load:
        await on_ray.when("3 decode workers", lambda state: state.counts["decode"] == 3)
        await on_ray.whole()
        await load.answers("decode-2", 1)
        assert "a step takes" in (await on_ray.look()).scaling
    await on_ray.when("1 decode worker", lambda state: state.counts["decode"] == 1)
    await on_ray.when("the others have drained", lambda state: len(state.processes) == 5)
    await asyncio.to_thread(on_ray.driver.scale, {"decode": (2, 2)})
    await on_ray.when("2 decode workers", lambda state: state.counts["decode"] == 2)
    await on_ray.whole()


@pytest.mark.parametrize("process", ["decode-0", "prefill-1", "router-1"])
async def test_a_killed_process_is_started_again_by_its_host(on_ray: OnRay, process: str) -> None:
    async with on_ray.loaded():
        before = on_ray.process(process)
        assert before.pid is not None
        os.kill(before.pid, signal.SIGKILL)
        await on_ray.returns(before, on_another_host=False)


async def test_a_killed_host_takes_its_process_along_and_both_are_replaced(on_ray: OnRay) -> None:
    async with on_ray.loaded():
        before = on_ray.process("decode-1")
        assert before.pid is not None and before.host_pid is not None
        os.kill(before.host_pid, signal.SIGKILL)
        await wait_gone(before.pid)
        await on_ray.returns(before, on_another_host=True)


async def test_a_killed_keeper_finds_its_hosts_again(on_ray: OnRay) -> None:
    async with on_ray.loaded() as load:
        before = await on_ray.look()
        keeper = next(pid for pid, command in on_ray.nodes.pids().items() if "KeeperActor" in command)
        os.kill(keeper, signal.SIGKILL)
        await load.answers()
        killed = on_ray.process("prefill-0")
        assert killed.pid is not None
        os.kill(killed.pid, signal.SIGKILL)  # maybe nobody looks after it yet
        await on_ray.returns(killed, on_another_host=False)
        await on_ray.whole()
        kept = {each.id: each.pid for each in before.processes if each.id != killed.id}
        assert {each.id: each.pid for each in on_ray.state.processes if each.id != killed.id} == kept


async def test_a_stopped_host_is_replaced_and_ends_when_it_goes_on(on_ray: OnRay) -> None:
    async with on_ray.loaded():
        before = on_ray.process("decode-0")
        assert before.pid is not None and before.host_pid is not None
        os.kill(before.host_pid, signal.SIGSTOP)
        try:
            await on_ray.returns(before, on_another_host=True)
            await wait_gone(before.pid, LIMIT_S)  # Ray has killed its host
        finally:
            with contextlib.suppress(ProcessLookupError):  # where Ray has killed it meanwhile
                os.kill(before.host_pid, signal.SIGCONT)
        await wait_gone(before.host_pid, LIMIT_S)


async def test_processes_of_a_lost_node_come_back_on_another(on_ray: OnRay) -> None:
    async with on_ray.loaded():
        state = await on_ray.look()
        lost = on_ray.process("decode-0")
        assert lost.pid is not None and lost.host_pid is not None
        raylet = on_ray.nodes.raylet_of(lost.host_pid)
        there = [each for each in state.processes if on_ray.nodes.raylet_of(each.host_pid or 0) == raylet]
        print("on the lost node:", [each.id for each in there])
        os.kill(raylet, signal.SIGKILL)
        # Nobody ends its process now but the later epoch of its id. Not before: a process that stands still when its
        # group is orphaned gets SIGHUP from the kernel, and its child ends with it.
        await wait_gone(raylet)
        os.kill(lost.host_pid, signal.SIGSTOP)
        for each in there:
            if each is not lost:
                assert each.pid is not None and each.host_pid is not None
                await wait_gone(each.pid)
                await wait_gone(each.host_pid)
        for each in there:
            await on_ray.returns(each, on_another_host=True)
        await wait_gone(lost.pid, LIMIT_S)
        assert exit_code_of_zombie(lost.pid) == EXIT_SUPERSEDED
        os.kill(lost.host_pid, signal.SIGCONT)
        await wait_gone(lost.host_pid)


async def test_down_leaves_no_process_and_no_name(on_ray: OnRay) -> None:
    ours = [pid for each in on_ray.state.processes for pid in (each.pid, each.host_pid) if pid is not None]
    down = await asyncio.to_thread(
        run_cli, "ray", "down", "--address", on_ray.nodes.address, "--name", NAME, limit_s=200
    )
    assert down.returncode == 0, down.stderr
    for pid in ours:
        await wait_gone(pid)
    import ray

    assert ray.util.list_named_actors(all_namespaces=True) == []
    assert {each["state"] for each in ray.util.placement_group_table().values()} == {"REMOVED"}
    assert not [command for command in on_ray.nodes.pids().values() if "pdserve.cli" in command]
