"""Finding whom a fault hits: somebody with a request in the phase that the fault is aimed at."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from pdserve.messages import Role
from tests.simulation.client import Client
from tests.simulation.cluster import SimRouter, SimWorker
from tests.simulation.kinds import ON_CLIENT, ON_DECODE, ON_PREFILL, ON_ROUTER, Fault, Kind, Moment
from tests.simulation.phases import Legs, attempts_of, is_draining
from tests.simulation.stage import Stage

PATIENCE_S = 1.5  # how long a fault waits for its moment; then it strikes anyhow
STRANGER = "x"  # ids of workers that don't fit begin so
SOON_TOKENS = 5
TRIES = 4  # at a moment that may pass
DRAINS_S = 0.5  # how long it waits for a drain to have begun

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Target:
    """Who is hit. workers: the victim; for links both ends, the prefill worker first."""

    workers: tuple[SimWorker, ...] = ()
    router: SimRouter | None = None
    client: Client | None = None

    def __str__(self) -> str:
        names = [worker.id for worker in self.workers]
        names += [self.router.id] if self.router is not None else []
        names += [self.client.log.plan.name] if self.client is not None else []
        return " ".join(names) or "-"


class Moments:
    """Wakes those that wait for something to be so. `look` is called after each turn of any engine owner."""

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Future[None], Callable[[], bool]] = {}

    def look(self) -> None:
        """Something may have changed."""
        for future, is_so in list(self._waiting.items()):
            if not future.done() and is_so():
                future.set_result(None)

    async def wait_for(self, find: Callable[[], T | None], patience_s: float) -> T | None:
        """What `find` finds, as soon as it finds something; None after patience_s."""
        found = find()
        if found is not None:
            return found

        def is_so() -> bool:
            nonlocal found
            found = find()
            return found is not None

        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[future] = is_so
        try:
            async with asyncio.timeout(patience_s):
                await future
        except TimeoutError:
            return None
        finally:
            del self._waiting[future]
        return found


class Aim:
    """Finds the targets of faults."""

    def __init__(self, stage: Stage, clients: Sequence[Client]) -> None:
        self.moments = Moments()
        self._stage = stage
        self._clients = clients

    async def target(self, fault: Fault) -> Target | None:
        """Who is hit, in the moment in which it is to be hit; without such a moment somebody of the kind."""
        moment = fault.moment
        if fault.kind is Kind.KILL_UNHEARD:
            return await self._mute(fault)
        if moment is Moment.DRAINING:
            found = await self.moments.wait_for(
                lambda: self._pick(fault, self._hits(fault.kind, _busy(fault))), PATIENCE_S
            )
            if found is not None:
                return await self._draining(fault, found)
        elif moment is not Moment.ANY:
            found = await self.moments.wait_for(
                lambda: self._pick(fault, self._hits(fault.kind, (moment,))), PATIENCE_S
            )
            if found is not None:
                return found
        return self._pick(fault, self._candidates(fault.kind))

    async def _mute(self, fault: Fault) -> Target | None:
        """Keep a prefill worker's word from the routers until a hand-off of its is confirmed; a few tries."""
        for _ in range(TRIES):
            found = await self.moments.wait_for(
                lambda: self._pick(fault, self._hits(fault.kind, (Moment.GRANTED, Moment.PULLING))),
                PATIENCE_S,
            )
            if found is None:
                return None
            [prefill] = found.workers
            if await self._is_muted_long_enough(prefill, drains=fault.moment is Moment.DRAINING):
                return found
        return None

    async def _is_muted_long_enough(self, prefill: SimWorker, *, drains: bool) -> bool:
        fabric, routers = self._stage.cluster.fabric, self._stage.cluster.routers
        with self._stage.ledger.effect("muted", workers=(prefill.id,)):
            for router_id in routers:
                fabric.cut(prefill.id, router_id, up=True, down=False)
            if drains:
                self._drain_peers(prefill)
            patience_s = self._stage.scenario.config.timeouts.keepalive_s
            unheard = await self.moments.wait_for(
                lambda: True if self._is_unheard(prefill) else None, patience_s
            )
            if unheard is None:
                for router_id in routers:
                    fabric.heal(prefill.id, router_id)
        return unheard is not None

    def _drain_peers(self, prefill: SimWorker) -> None:
        """The decode workers that are about to get something from it."""
        for worker in self._stage.cluster.workers.values():
            legs = self._stage.sight.legs_on(worker).values()
            if worker is not prefill and any(
                each.decode is not None and each.decode.source == prefill.ref for each in legs
            ):
                worker.drain()

    async def _draining(self, fault: Fault, target: Target) -> Target:
        """Let a target that has work in hand begin to drain, and come back when it does."""
        worker = self._drained_worker(target)
        if worker is not None:
            worker.drain()
            await self.moments.wait_for(lambda: True if is_draining(worker) else None, DRAINS_S)
        return target

    def _drained_worker(self, target: Target) -> SimWorker | None:
        if target.workers:
            return target.workers[-1]
        phases = (Moment.PULLING, Moment.STREAMING, Moment.COMMITTED)
        for handle, each in self._stage.sight.legs().items():
            if each.phase in phases and self._belongs(handle, target):
                return self._worker_of(handle)
        return None

    def _belongs(self, handle: int, target: Target) -> bool:
        apps = [target.router.app] if target.router is not None else []
        apps += [target.client.app] if target.client is not None else []
        for app in apps:
            for conductor in () if app is None else app.conductors:
                if target.client is not None and conductor.request_id != target.client.request_id:
                    continue
                if any(run.attempt is not None and run.attempt.handle == handle for run in conductor.runs):
                    return True
        return False

    def _worker_of(self, handle: int) -> SimWorker | None:
        """The last worker that has it: a decode worker, if one has."""
        found = None
        for worker in self._stage.cluster.workers.values():
            if any(attempt.handle == handle for attempt in attempts_of(worker)):
                found = worker if found is None or worker.role is not Role.PREFILL else found
        return found

    # --- who fits

    @staticmethod
    def _pick(fault: Fault, targets: Sequence[Target]) -> Target | None:
        return targets[int(fault.draw * len(targets))] if targets else None

    def _candidates(self, kind: Kind) -> list[Target]:
        """All that the fault could hit, in whatever phase."""
        if kind in ON_CLIENT:
            return [Target(client=client) for client in self._clients if client.app is not None]
        if kind in ON_ROUTER:
            routers = self._stage.cluster.routers.values()
            return [Target(router=router) for router in routers if router.app is not None]
        workers = [worker for worker in self._stage.cluster.workers.values() if _fits(kind, worker)]
        if kind not in (Kind.CUT_LINK, Kind.LINK_DIES):
            return [Target((worker,)) for worker in workers]
        prefills = [worker for worker in workers if worker.role is Role.PREFILL]
        decodes = [worker for worker in workers if worker.role is not Role.PREFILL]
        return [Target((prefill, decode)) for prefill in prefills for decode in decodes]

    def _hits(self, kind: Kind, moments: Sequence[Moment]) -> list[Target]:
        """Those with a request in one of the phases."""
        sight = self._stage.sight
        if kind in ON_CLIENT:
            return [
                target
                for target in self._candidates(kind)
                if target.client is not None
                and target.client.app is not None
                and _meets(sight.of_request(target.client.app, target.client.request_id), moments)
            ]
        if kind in ON_ROUTER:
            return [
                target
                for target in self._candidates(kind)
                if target.router is not None
                and target.router.app is not None
                and _meets(sight.on_router(target.router.app), moments)
            ]
        if kind in (Kind.CUT_LINK, Kind.LINK_DIES):
            legs = sight.legs()
            return [
                target
                for target in self._candidates(kind)
                if any(each.phase in moments and _runs_on(each, target) for each in legs.values())
            ]
        hits = [
            target for target in self._candidates(kind) if _meets(sight.on_worker(target.workers[0]), moments)
        ]
        if kind is Kind.DRAIN_DECODE and Moment.STREAMING in moments:
            hits = [target for target in hits if _is_crowded(target.workers[0])]
        return hits

    def _is_unheard(self, prefill: SimWorker) -> bool:
        """Whether a hand-off of this worker is confirmed while its router has not heard a first token."""
        legs = self._stage.sight.legs()
        for router in self._stage.cluster.routers.values():
            for conductor in () if router.app is None else router.app.conductors:
                for run in conductor.runs:
                    attempt = run.attempt
                    if attempt is None or attempt.prefill is None or attempt.has_first_token:
                        continue
                    each = legs.get(attempt.handle)
                    if (
                        attempt.prefill.id == prefill.id
                        and each is not None
                        and each.phase is Moment.STREAMING
                    ):
                        return True
        return False


def _busy(fault: Fault) -> Sequence[Moment]:
    """What a worker must be doing for its drain to take a while; a prefill worker is killed before or after READY."""
    if fault.kind is Kind.KILL_PREFILL:
        return (Moment.GRANTED,) if fault.draw < 0.5 else (Moment.PULLING, Moment.COMMITTED)
    return (Moment.GRANTED, Moment.PULLING, Moment.COMMITTED, Moment.STREAMING)


def _meets(phases: dict[Moment, None], moments: Sequence[Moment]) -> bool:
    return any(moment in phases for moment in moments)


def _runs_on(legs: Legs, pair: Target) -> bool:
    prefill, decode = pair.workers
    return (
        legs.decode is not None
        and legs.decode.source is not None
        and legs.decode.source == prefill.ref
        and any(attempt is legs.decode for attempt in attempts_of(decode))
    )


def _is_crowded(worker: SimWorker) -> bool:
    """Whether its pool is about to run full: none is left, and of several sequences one needs a block in a moment."""
    run = None if worker.worker is None else worker.worker.current
    if run is None or run.engine.pool.available > 0:
        return False
    sequences = run.engine.sequences
    size = run.engine.pool.block_size
    return len(sequences) >= 2 and any(
        0 <= len(seq.block_table) * size - len(seq.ids) < SOON_TOKENS < seq.key.max_tokens - seq.num_generated
        for seq in sequences
    )


def is_stranger(worker_id: str) -> bool:
    """Whether it doesn't belong to the cluster."""
    return worker_id.startswith(STRANGER)


def _fits(kind: Kind, worker: SimWorker) -> bool:
    if not worker.alive or worker.is_stopped or is_stranger(worker.id):
        return False
    if kind in ON_PREFILL:
        return worker.role is Role.PREFILL
    return worker.role is not Role.PREFILL if kind in ON_DECODE else True
