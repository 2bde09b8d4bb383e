"""Faults as they strike: what happens, whom it concerns, and how it is mended."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from kv_transfer.frames import Kind as FrameKind
from pdserve.errors import PdserveError
from pdserve.messages import Role
from router.app import RouterApp
from tests.simulation.aim import Aim, Target
from tests.simulation.client import Client
from tests.simulation.cluster import SimRouter, SimWorker
from tests.simulation.kinds import Fault, Kind, Moment
from tests.simulation.newcomers import Newcomers
from tests.simulation.phases import Legs
from tests.simulation.stage import Stage

CORRUPTS_S = 1.5  # so long at least it waits for pieces in its phase
HANG_S = 12.0  # a hanging engine that nobody misses for so long comes back
SLOWNESS = 15.0
LOOK_S = 0.05
JUST_S = 1e-6  # less is rounding
DIES_AT = {
    Moment.GRANTED: (FrameKind.READY, FrameKind.PULL),
    Moment.PULLING: (FrameKind.DATA, FrameKind.PULL),
    Moment.COMMITTED: (FrameKind.CONFIRM, FrameKind.ACK),
}
"""The frame at which a link dies: of the prefill worker, of the decode worker."""


class Chaos:
    """Runs the faults of one scenario."""

    def __init__(self, stage: Stage, clients: Sequence[Client]) -> None:
        self.aim = Aim(stage, clients)
        self._stage = stage
        self._newcomers = Newcomers(stage)

    async def run(self) -> None:
        """All faults, each in its time; ends when the last is mended."""
        begun_s = self._stage.tape.now_s()
        async with asyncio.TaskGroup() as group:
            for fault in self._stage.scenario.faults:
                group.create_task(self._one(fault, begun_s))

    async def _one(self, fault: Fault, begun_s: float) -> None:
        await asyncio.sleep(max(0.0, begun_s + fault.at_s - self._stage.tape.now_s()))
        target = await self.aim.target(fault)
        self._stage.tape.tell(
            f"FAULT {fault.kind.value}, aimed at {fault.moment.value}: {target or 'nobody'}"
        )
        if target is not None:
            await self._strikes()[fault.kind](fault, target)
            self._stage.tape.tell(f"MENDED {fault.kind.value}: {target}")

    def _strikes(self) -> dict[Kind, Callable[[Fault, Target], Awaitable[None]]]:
        return {
            Kind.CANCEL: self._cancel,
            Kind.DEAF_CLIENT: self._deafen,
            Kind.KILL_PREFILL: self._kill,
            Kind.KILL_DECODE: self._kill,
            Kind.KILL_UNHEARD: self._kill,
            Kind.NO_PREFILL: self._kill_all,
            Kind.NO_DECODE: self._kill_all,
            Kind.CUT_LINK: self._cut_link,
            Kind.LINK_DIES: self._break_link,
            Kind.NOISY_LINK: self._disturb_link,
            Kind.STOP_PREFILL: self._stop,
            Kind.STOP_DECODE: self._stop,
            Kind.CORRUPT: self._corrupt,
            Kind.TWIN_PREFILL: self._newcomers.twin,
            Kind.TWIN_DECODE: self._newcomers.twin,
            Kind.KILL_ROUTER: self._kill_router,
            Kind.DRAIN_ROUTER: self._drain_router,
            Kind.RESET_ROUTER: self._reset_router,
            Kind.RESET_WORKER: self._reset_worker,
            Kind.CUT_SESSION: self._cut_session,
            Kind.HANG_PREFILL: self._hang,
            Kind.HANG_DECODE: self._hang,
            Kind.FAIL_STEP_PREFILL: self._fail_step,
            Kind.FAIL_STEP_DECODE: self._fail_step,
            Kind.FAIL_ROW_PREFILL: self._fail_row,
            Kind.FAIL_ROW_DECODE: self._fail_row,
            Kind.STRANGER: self._newcomers.stranger,
            Kind.DRAIN_PREFILL: self._drain,
            Kind.DRAIN_DECODE: self._drain,
            Kind.SWITCH_ROLE: self._switch_role,
            Kind.SLOW: self._slow,
            Kind.JOIN: self._newcomers.join,
        }

    # --- clients

    async def _cancel(self, fault: Fault, target: Target) -> None:
        assert target.client is not None, "aimed at a client"
        target.client.cancel()

    async def _deafen(self, fault: Fault, target: Target) -> None:
        assert target.client is not None, "aimed at a client"
        target.client.go_deaf()

    # --- workers

    async def _kill(self, fault: Fault, target: Target) -> None:
        [victim] = target.workers
        self._count_kill(victim)
        with self._stage.ledger.effect(fault.kind.value, workers=(victim.id,)):
            victim.kill()
            for router_id in self._stage.cluster.routers:  # of a worker that was muted first
                self._stage.cluster.fabric.heal(victim.id, router_id)
            await asyncio.sleep(fault.lasts_s)
            victim.start()

    def _count_kill(self, victim: SimWorker) -> None:
        """Rows 3 to 7 by what the victim was doing, and 11."""
        legs = self._stage.sight.legs_on(victim)
        self._stage.coverage.add(11, *self._phases(victim))
        for each in legs.values():
            row = self._row_of_kill(victim, each)
            if row is not None:
                self._stage.coverage.add(row, *each.phases)
        for handle, each in self._stage.sight.legs().items():
            came_from = None if each.decode is None else each.decode.source
            if each.phase is Moment.STREAMING and came_from == victim.ref and self._is_unheard(handle):
                self._stage.coverage.add(5, *each.phases)

    @staticmethod
    def _row_of_kill(victim: SimWorker, legs: Legs) -> int | None:
        if victim.role is not Role.PREFILL:
            return 7 if legs.phase is Moment.STREAMING else 6
        if legs.phase is Moment.STREAMING:
            return None
        return 4 if legs.phase in (Moment.PULLING, Moment.COMMITTED) else 3

    def _is_unheard(self, handle: int) -> bool:
        """Whether the router has no token of this attempt yet."""
        for router in self._stage.cluster.routers.values():
            for conductor in () if router.app is None else router.app.conductors:
                for run in conductor.runs:
                    if run.attempt is not None and run.attempt.handle == handle:
                        return not run.attempt.has_first_token
        return False

    async def _kill_all(self, fault: Fault, target: Target) -> None:
        """Nobody of a role is left for a while."""
        role = Role.PREFILL if fault.kind is Kind.NO_PREFILL else Role.DECODE
        victims = [worker for worker in self._stage.cluster.workers.values() if self._has_role(worker, role)]
        with self._stage.ledger.effect(fault.kind.value, workers=[victim.id for victim in victims]):
            for victim in victims:
                self._count_kill(victim)
                victim.kill()
            await self._see_nobody(fault.lasts_s)
            for victim in victims:
                victim.start()

    @staticmethod
    def _has_role(worker: SimWorker, role: Role) -> bool:
        """A worker that does both can do without prefill workers, and is a decode worker."""
        return worker.alive and (worker.role is Role.PREFILL) is (role is Role.PREFILL)

    async def _see_nobody(self, lasts_s: float) -> None:
        """Count the requests that wait meanwhile."""
        seen: dict[str, None] = {}
        until_s = self._stage.tape.now_s() + lasts_s
        while (left_s := until_s - self._stage.tape.now_s()) > JUST_S:
            await asyncio.sleep(min(LOOK_S, left_s))
            for router in self._stage.cluster.routers.values():
                if router.app is None or not router.app.fleet.topology.missing:
                    continue
                for conductor in router.app.conductors:
                    waits = any(run.attempt is None and run.choice.reason is None for run in conductor.runs)
                    if waits and conductor.request_id not in seen:
                        seen[conductor.request_id] = None
                        self._stage.coverage.add(20, Moment.QUEUED)

    async def _stop(self, fault: Fault, target: Target) -> None:
        [victim] = target.workers
        self._stage.coverage.add(9, *self._phases(victim))
        with self._stage.ledger.effect(fault.kind.value, workers=(victim.id,)):
            victim.stop()
            await asyncio.sleep(fault.lasts_s)
            victim.resume()

    async def _slow(self, fault: Fault, target: Target) -> None:
        [victim] = target.workers
        with self._stage.ledger.effect(fault.kind.value, workers=(victim.id,)):
            victim.slowness = SLOWNESS
            await asyncio.sleep(fault.lasts_s)
            victim.slowness = 1.0

    async def _hang(self, fault: Fault, target: Target) -> None:
        """With work in hand the process ends itself; an idle engine that hangs is found by its next request."""
        [victim] = target.workers
        self._stage.coverage.add(15, *self._phases(victim))
        with self._stage.ledger.effect(fault.kind.value, workers=(victim.id,)):
            victim.hang_engine()
            try:
                async with asyncio.timeout(HANG_S):
                    await victim.ended()
            except TimeoutError:
                victim.resume_engine()

    async def _fail_step(self, fault: Fault, target: Target) -> None:
        target.workers[0].fail_next_step()

    async def _fail_row(self, fault: Fault, target: Target) -> None:
        target.workers[0].lose_next_row()

    async def _drain(self, fault: Fault, target: Target) -> None:
        [victim] = target.workers
        self._stage.coverage.add(23, *self._phases(victim))
        with self._stage.ledger.effect(fault.kind.value, workers=(victim.id,)):
            victim.drain()
            await victim.ended()

    async def _switch_role(self, fault: Fault, target: Target) -> None:
        [victim] = target.workers
        role = Role.DECODE if victim.role is Role.PREFILL else Role.PREFILL
        same = [
            worker for worker in self._stage.cluster.workers.values() if self._has_role(worker, victim.role)
        ]
        apps = [router.app for router in self._stage.cluster.routers.values() if router.app is not None]
        if len(same) < 2 or victim.role is Role.BOTH or not apps:
            return
        with self._stage.ledger.effect(fault.kind.value, workers=(victim.id,)):
            if _ask_role(apps[0], victim.id, role):
                run = None if victim.worker is None else victim.worker.current
                victim.role = role
                timeouts = self._stage.scenario.config.timeouts
                left_s = timeouts.drain_s + timeouts.lease_s + 4.0
                while left_s > 0 and victim.worker is not None and victim.worker.current is run:
                    left_s -= LOOK_S
                    await asyncio.sleep(LOOK_S)
                current = None if victim.worker is None else victim.worker.current
                if current is not None:
                    victim.role = current.role  # the order may have been lost

    # --- links

    async def _cut_link(self, fault: Fault, target: Target) -> None:
        prefill, decode = target.workers
        self._stage.coverage.add(8, *self._phases_on_pair(target))
        ways = ((prefill.id, decode.id), (decode.id, prefill.id))
        cut = ways if fault.draw < 0.4 else ways[:1] if fault.draw < 0.7 else ways[1:]
        with self._stage.ledger.effect(fault.kind.value, links=ways[:1]):
            for source, receiver in cut:
                self._stage.cluster.network.cut(source, receiver)
            await asyncio.sleep(fault.lasts_s)
            for source, receiver in cut:
                self._stage.cluster.network.heal(source, receiver)

    async def _break_link(self, fault: Fault, target: Target) -> None:
        """The connection ends: at a certain frame, or with the next one."""
        prefill, decode = target.workers
        from_prefill = int(fault.draw * 1000) % 2 == 0
        victim = prefill if from_prefill else decode
        kinds = DIES_AT.get(fault.moment)
        victim.trouble.dies_at = None if kinds is None else kinds[0 if from_prefill else 1]
        victim.trouble.dies = True
        victim.trouble.on_death = lambda: self._stage.coverage.add(8, *self._phases(victim))
        with self._stage.ledger.effect(fault.kind.value, workers=(victim.id,)):
            await asyncio.sleep(fault.lasts_s)
            victim.trouble.dies = False

    async def _disturb_link(self, fault: Fault, target: Target) -> None:
        [victim] = target.workers
        with self._stage.ledger.effect(fault.kind.value, workers=(victim.id,)):
            victim.trouble.is_noisy = True
            await asyncio.sleep(fault.lasts_s)
            victim.trouble.is_noisy = False

    async def _corrupt(self, fault: Fault, target: Target) -> None:
        """Pieces of leases in the phase that the fault is aimed at."""
        [victim] = target.workers

        def corrupts(lease_id: int) -> bool:
            legs = self._stage.sight.legs_on(victim).values()
            for each in legs:
                is_it = each.prefill is not None and each.prefill.lease.lease_id == lease_id
                if is_it and fault.moment in each.phases:
                    self._stage.coverage.add(10, *each.phases)
                    return True
            return False

        with self._stage.ledger.effect(fault.kind.value, workers=(victim.id,)):
            victim.trouble.corrupts = corrupts
            victim.trouble.num_corrupt_left = 1 + int(fault.draw * 4)
            await asyncio.sleep(max(fault.lasts_s, CORRUPTS_S))
            victim.trouble.num_corrupt_left = 0

    # --- routers and sessions

    async def _kill_router(self, fault: Fault, target: Target) -> None:
        router = self._hit_router(13, target)
        with self._stage.ledger.effect(fault.kind.value, routers=(router.id,)):
            router.kill()
            await asyncio.sleep(fault.lasts_s)
            router.start()

    async def _drain_router(self, fault: Fault, target: Target) -> None:
        router = self._hit_router(23, target)
        with self._stage.ledger.effect(fault.kind.value, routers=(router.id,)):
            try:
                await router.drain()
            except PdserveError as error:
                self._stage.tape.tell(f"drain ended by {error}")
            await asyncio.sleep(min(0.5, fault.lasts_s))
            router.start()

    async def _reset_router(self, fault: Fault, target: Target) -> None:
        router = self._hit_router(14, target)
        with self._stage.ledger.effect(fault.kind.value, routers=(router.id,)):
            self._stage.cluster.fabric.reset(router_id=router.id)

    def _hit_router(self, row: int, target: Target) -> SimRouter:
        router = target.router
        assert router is not None, "aimed at a router"
        if router.app is not None:
            self._stage.coverage.add(row, *self._stage.sight.on_router(router.app))
        return router

    async def _reset_worker(self, fault: Fault, target: Target) -> None:
        [victim] = target.workers
        self._stage.coverage.add(14, *self._phases(victim))
        with self._stage.ledger.effect(fault.kind.value, workers=(victim.id,)):
            self._stage.cluster.fabric.reset(worker_id=victim.id)

    async def _cut_session(self, fault: Fault, target: Target) -> None:
        [victim] = target.workers
        self._stage.coverage.add(14, *self._phases(victim))
        routers = list(self._stage.cluster.routers)
        router_id = routers[int(fault.draw * 7919) % len(routers)]
        up, down = ((True, True), (True, False), (False, True))[int(fault.draw * 3)]
        with self._stage.ledger.effect(fault.kind.value, sessions=((victim.id, router_id),)):
            self._stage.cluster.fabric.cut(victim.id, router_id, up=up, down=down)
            await asyncio.sleep(fault.lasts_s)
            self._stage.cluster.fabric.heal(victim.id, router_id)

    # --- what requests are doing

    def _phases(self, victim: SimWorker) -> dict[Moment, None]:
        return self._stage.sight.on_worker(victim)

    def _phases_on_pair(self, target: Target) -> dict[Moment, None]:
        prefill, decode = target.workers
        of_prefill = self._stage.sight.legs_on(prefill)
        of_decode = self._stage.sight.legs_on(decode)
        return {
            phase: None for handle, each in of_decode.items() if handle in of_prefill for phase in each.phases
        } | {
            each.phase: None
            for each in of_decode.values()
            if each.decode is not None and each.decode.source == prefill.ref
        }


def _ask_role(app: RouterApp, worker_id: str, role: Role) -> bool:
    """Whether the router has passed it on: it must know the worker, and another of its role."""
    try:
        app.operators.set_role(worker_id, role)
    except PdserveError:
        return False
    return True
