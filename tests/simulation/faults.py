"""Faults as they strike: who is hit, what happens, and how it is mended."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

from pdserve.errors import PdserveError
from pdserve.messages import Role
from tests.simulation.cluster import SimCluster, SimWorker
from tests.simulation.phases import phases_of
from tests.simulation.scenario import BLOCK_SIZE, Fault, Kind, Moment, Scenario

LOOK_EVERY_S = 0.001  # how often a fault that waits for a moment looks for it
HANG_S = 30.0  # a hanging engine that nobody misses for so long comes back
TWIN_S = 20.0  # the earlier of two processes must be gone by then, also when no router was there at first
PATIENCE_S = 2.5  # how long it looks; then it strikes anyhow

ROWS = {
    Kind.KILL_PREFILL: (3, 4, 11),
    Kind.KILL_DECODE: (6, 7, 11),
    Kind.CUT_LINK: (8,),
    Kind.STOP_PREFILL: (9,),
    Kind.STOP_DECODE: (9,),
    Kind.TWIN: (12,),
    Kind.KILL_ROUTER: (13,),
    Kind.RESET_SESSIONS: (14,),
    Kind.CUT_SESSION: (14,),
    Kind.HANG_PREFILL: (15,),
    Kind.HANG_DECODE: (15,),
    Kind.FAIL_STEP: (16,),
    Kind.STRANGER: (21,),
    Kind.DRAIN_PREFILL: (23,),
    Kind.DRAIN_DECODE: (23,),
    Kind.DRAIN_ROUTER: (23,),
}
"""Rows of docs/reliability.md that a fault exercises by itself; the others come from requests and sizes."""

Coverage = Counter[tuple[int, str]]
"""(row, phase) -> how often a fault of the row struck while a request was in the phase."""


class Chaos:
    """Runs the faults of one scenario. `tell` writes a line of the trace."""

    def __init__(
        self, cluster: SimCluster, scenario: Scenario, tell: Callable[[str], None], coverage: Coverage
    ) -> None:
        self._cluster = cluster
        self._scenario = scenario
        self._tell = tell
        self._coverage = coverage
        self._num_made = 0
        self.over = False  # nothing is broken any more, and nothing will be

    async def run(self) -> None:
        """All faults, each in its time; ends when the last is mended."""
        begun_s = self._cluster.clock.now_s()
        async with asyncio.TaskGroup() as group:
            for fault in self._scenario.faults:
                group.create_task(self._one(fault, begun_s))
        self.over = True

    async def _one(self, fault: Fault, begun_s: float) -> None:
        await asyncio.sleep(max(0.0, begun_s + fault.at_s - self._cluster.clock.now_s()))
        victim = await self._victim(fault)
        self._count(fault, victim)
        self._tell(f"fault: {fault.kind.value}, victim {'-' if victim is None else victim.id}")
        match fault.kind:
            case Kind.KILL_ROUTER:
                await self._kill_router(fault)
            case Kind.DRAIN_ROUTER:
                await self._drain_router(fault)
            case Kind.STRANGER:
                await self._stranger(fault)
            case Kind.JOIN:
                self._join(fault)
            case _ if victim is not None:
                await self._strike(fault, victim)
            case _:
                self._tell("nobody is left to be hit")

    # --- who and when

    async def _victim(self, fault: Fault) -> SimWorker | None:
        """A worker that fits and has a request in the wanted phase; after PATIENCE_S any that fits."""
        patience_ends_s = self._cluster.clock.now_s() + PATIENCE_S
        while True:
            fitting = [worker for worker in self._cluster.workers.values() if self._fits(fault.kind, worker)]
            hit = [worker for worker in fitting if fault.moment in phases_of(worker)]
            if fault.moment is Moment.ANY or self._cluster.clock.now_s() > patience_ends_s:
                hit = hit or fitting
            if hit:
                return hit[int(fault.draw * len(hit))]
            if self._cluster.clock.now_s() > patience_ends_s:
                return None
            await asyncio.sleep(LOOK_EVERY_S)

    def _fits(self, kind: Kind, worker: SimWorker) -> bool:
        if not worker.alive or worker.is_stopped:
            return False
        if kind in (Kind.KILL_PREFILL, Kind.STOP_PREFILL, Kind.HANG_PREFILL, Kind.DRAIN_PREFILL, Kind.CORRUPT):
            return worker.role is Role.PREFILL
        if kind in (Kind.KILL_DECODE, Kind.STOP_DECODE, Kind.HANG_DECODE, Kind.DRAIN_DECODE):
            return worker.role is not Role.PREFILL
        return True

    def _count(self, fault: Fault, victim: SimWorker | None) -> None:
        workers = [victim] if victim is not None else list(self._cluster.workers.values())
        phases: dict[Moment, None] = {}
        for worker in workers:
            phases |= phases_of(worker)
        for row in ROWS.get(fault.kind, ()):
            for phase in phases:
                self._coverage[row, phase.value] += 1

    # --- what happens

    async def _strike(self, fault: Fault, victim: SimWorker) -> None:
        lasts_s = fault.lasts_s or 0.0
        match fault.kind:
            case Kind.KILL_PREFILL | Kind.KILL_DECODE:
                victim.kill()
                await asyncio.sleep(lasts_s)
                victim.start()
            case Kind.STOP_PREFILL | Kind.STOP_DECODE:
                victim.stop()
                await asyncio.sleep(lasts_s)
                victim.resume()
            case Kind.CUT_LINK:
                await self._cut_link(fault, victim)
            case Kind.RESET_SESSIONS:
                self._cluster.fabric.reset(worker_id=victim.id)
            case Kind.CUT_SESSION:
                await self._cut_session(fault, victim)
            case Kind.TWIN:
                await self._twin(victim)
            case Kind.HANG_PREFILL | Kind.HANG_DECODE:
                await self._hang(victim)
            case Kind.FAIL_STEP:
                victim.fail_next_step()
            case Kind.DRAIN_PREFILL | Kind.DRAIN_DECODE:
                victim.drain()
                await victim.ended()
            case Kind.SWITCH_ROLE:
                await self._switch_role(victim)
            case Kind.SLOW:
                victim.slowness = 20.0
                await asyncio.sleep(lasts_s)
                victim.slowness = 1.0
            case Kind.CORRUPT:
                victim.corrupts.num_left += 1 + int(fault.draw * 3)
            case _:
                raise AssertionError(f"no way to strike with {fault.kind}")

    async def _hang(self, victim: SimWorker) -> None:
        """With work in hand the process ends itself; an idle engine that hangs is found by its next request."""
        victim.hang_engine()
        try:
            async with asyncio.timeout(HANG_S):
                await victim.ended()
        except TimeoutError:
            victim.resume_engine()

    async def _cut_link(self, fault: Fault, victim: SimWorker) -> None:
        others = [worker.id for worker in self._cluster.workers.values() if worker.id != victim.id]
        other = others[int(fault.draw * 7919) % len(others)]
        ways = ((victim.id, other), (other, victim.id))
        cut = ways if fault.draw < 0.5 else ways[:1]
        for source, target in cut:
            self._cluster.network.cut(source, target)
        await asyncio.sleep(fault.lasts_s or 0.0)
        for source, target in cut:
            self._cluster.network.heal(source, target)

    async def _cut_session(self, fault: Fault, victim: SimWorker) -> None:
        routers = list(self._cluster.routers)
        router_id = routers[int(fault.draw * 7919) % len(routers)]
        one_way = fault.draw < 0.5
        self._cluster.fabric.cut(victim.id, router_id, up=True, down=not one_way)
        await asyncio.sleep(fault.lasts_s or 0.0)
        self._cluster.fabric.heal(victim.id, router_id)

    async def _twin(self, victim: SimWorker) -> None:
        """A second process under the victim's id: the later stays, the earlier exits."""
        twin = self._cluster.add_worker(victim.id, victim.role)
        async with asyncio.timeout(TWIN_S):
            await victim.ended()
        self._tell(f"the earlier {victim.id} exited with {victim.exit_codes}; the later lives: {twin.alive}")

    async def _switch_role(self, victim: SimWorker) -> None:
        role = Role.DECODE if victim.role is Role.PREFILL else Role.PREFILL
        same = [worker for worker in self._cluster.workers.values() if worker.role is victim.role and worker.alive]
        if len(same) < 2:
            return
        router = next((router for router in self._cluster.routers.values() if router.app is not None), None)
        if router is not None and router.app is not None and router.app.set_role(victim.id, role):
            victim.role = role
            await asyncio.sleep(self._scenario.config.timeouts.drain_s + 8.0)

    async def _kill_router(self, fault: Fault) -> None:
        routers = list(self._cluster.routers.values())
        router = routers[int(fault.draw * len(routers))]
        router.kill()
        await asyncio.sleep(fault.lasts_s or 0.0)
        router.start()

    async def _drain_router(self, fault: Fault) -> None:
        routers = list(self._cluster.routers.values())
        router = routers[int(fault.draw * len(routers))]
        try:
            await router.drain()
        except PdserveError as error:
            self._tell(f"drain ended by {error}")
        await asyncio.sleep(fault.lasts_s or 0.0)
        router.start()

    async def _stranger(self, fault: Fault) -> None:
        """A worker of another layout: refused, never routed to."""
        self._num_made += 1
        stranger = self._cluster.add_worker(
            f"x{self._num_made}", Role.DECODE if fault.draw < 0.5 else Role.PREFILL, block_size=2 * BLOCK_SIZE
        )
        await asyncio.sleep(fault.lasts_s or 0.0)
        stranger.kill()
        del self._cluster.workers[stranger.id]

    def _join(self, fault: Fault) -> None:
        self._num_made += 1
        role = Role.DECODE if fault.draw < 0.5 else Role.PREFILL
        self._cluster.add_worker(f"j{self._num_made}", role)
