"""In which phases requests are, read off the workers that have them in hand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from decode_worker.attempt import DecodeAttempt, DecodeState
from prefill_worker.attempt import PrefillAttempt, PrefillState
from router.app import RouterApp
from router.conductor import Conductor
from tests.simulation.cluster import SimCluster, SimWorker
from tests.simulation.kinds import Moment


@dataclass(frozen=True, slots=True)
class Legs:
    """What two workers know of one attempt; None: nothing (yet, or any more)."""

    prefill: PrefillAttempt | None
    decode: DecodeAttempt | None
    draining: bool = False  # one of the two workers drains

    @property
    def has_offered(self) -> bool:
        """Whether blocks have been announced to the decode worker."""
        return self.prefill is not None and self.prefill.lease.upto > self.prefill.lease.num_skip

    @property
    def phase(self) -> Moment:
        """The furthest that is known."""
        prefill, decode = self.prefill, self.decode
        if decode is not None and decode.state is DecodeState.ACTIVE:
            return Moment.STREAMING
        if prefill is not None and prefill.state is PrefillState.SAMPLED:
            return Moment.COMMITTED
        if self.has_offered or (decode is not None and decode.pull_progress):
            return Moment.PULLING
        if prefill is not None or (decode is not None and decode.state is DecodeState.GRANTED):
            return Moment.GRANTED
        return Moment.QUEUED

    @property
    def phases(self) -> tuple[Moment, ...]:
        """With DRAINING."""
        return (self.phase, Moment.DRAINING) if self.draining else (self.phase,)


class Sight:
    """Looks at a whole cluster."""

    def __init__(self, cluster: SimCluster) -> None:
        self._cluster = cluster

    def legs_on(self, worker: SimWorker) -> dict[int, Legs]:
        """By handle, all that a worker has in hand, or (a prefill worker) is to have."""
        here = {attempt.handle: attempt for attempt in attempts_of(worker)}
        return {
            handle: each
            for handle, each in self.legs().items()
            if (handle in here and here[handle] in (each.prefill, each.decode))
            or (
                each.decode is not None
                and each.decode.state is not DecodeState.ACTIVE
                and each.decode.source == worker.ref
            )
        }

    def legs(self) -> dict[int, Legs]:
        """By handle, all that any worker has in hand."""
        prefills: dict[int, PrefillAttempt] = {}
        decodes: dict[int, DecodeAttempt] = {}
        draining: dict[int, None] = {}
        for worker in self._cluster.workers.values():
            drains = is_draining(worker)
            for attempt in attempts_of(worker):
                if drains:
                    draining[attempt.handle] = None
                if isinstance(attempt, PrefillAttempt):
                    prefills[attempt.handle] = attempt
                else:
                    decodes[attempt.handle] = attempt
        return {
            handle: Legs(prefills.get(handle), decodes.get(handle), handle in draining)
            for handle in (*decodes, *(handle for handle in prefills if handle not in decodes))
        }

    def on_worker(self, worker: SimWorker) -> dict[Moment, None]:
        """Phases of the requests that a worker has in hand, without repeats."""
        return _joined(each.phases for each in self.legs_on(worker).values())

    def on_router(self, app: RouterApp) -> dict[Moment, None]:
        """Phases of the requests that a router conducts."""
        legs = self.legs()
        found = _joined(self._of(conductor, legs) for conductor in app.conductors)
        if found and app.admission.draining:
            found[Moment.DRAINING] = None
        return found

    def of_request(self, app: RouterApp, request_id: str) -> dict[Moment, None]:
        """Phases of the choices of one request."""
        legs = self.legs()
        return _joined(
            self._of(conductor, legs) for conductor in app.conductors if conductor.request_id == request_id
        )

    @staticmethod
    def handles_of(app: RouterApp, request_id: str) -> list[int]:
        """Of the attempts that run for a request."""
        return [
            run.attempt.handle
            for conductor in app.conductors
            if conductor.request_id == request_id
            for run in conductor.runs
            if run.attempt is not None
        ]

    def anywhere(self) -> dict[Moment, None]:
        """Phases of all requests on all workers."""
        return _joined(each.phases for each in self.legs().values())

    @staticmethod
    def _of(conductor: Conductor, legs: dict[int, Legs]) -> list[Moment]:
        phases: list[Moment] = []
        for run in conductor.runs:
            if run.choice.reason is not None:
                continue
            known = None if run.attempt is None else legs.get(run.attempt.handle)
            phases += known.phases if known is not None else (Moment.QUEUED,)
        return phases


def attempts_of(worker: SimWorker) -> list[DecodeAttempt | PrefillAttempt]:
    """What a worker has in hand."""
    run = None if worker.worker is None else worker.worker.current
    attempts = () if run is None else run.core.attempts
    return [attempt for attempt in attempts if isinstance(attempt, DecodeAttempt | PrefillAttempt)]


def is_draining(worker: SimWorker) -> bool:
    """Whether a worker takes no new work."""
    run = None if worker.worker is None else worker.worker.current
    return run is not None and run.draining


def _joined(phases: Iterator[tuple[Moment, ...]] | Iterator[list[Moment]]) -> dict[Moment, None]:
    return {phase: None for each in phases for phase in each}
