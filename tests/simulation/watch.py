"""What must hold at every moment of a run: looked at again and again while it lasts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from decode_worker.attempt import DecodeAttempt
from pdserve.messages import Role
from prefill_worker.attempt import PrefillAttempt
from router.phase_clock import AttemptPhase
from tests.simulation.aim import is_stranger
from tests.simulation.cluster import SimRouter, SimWorker
from tests.simulation.phases import attempts_of
from tests.simulation.stage import Stage

LOOK_S = 0.25
SLACK_S = 0.5  # delayed messages, clocks of another pace, and the time between two looks
HEARS_S = 0.02  # besides delays: what a queue of messages takes
STEPS_ON = 2  # tokens that a cancelled sequence may still get
LETS_GO_S = 1.0  # blocks of an aborted attempt are free so long after the abort, if their peer answers
UNANSWERED_S = 5.0  # and so much later if it doesn't: a prefill worker then gives up on who doesn't let go
PAIRS_UP_S = 3.0  # from the last trouble of two workers and a router until the pair must be in use


class Watch:
    """No wait outlives its limit; nobody works for a request that is over; who can serve does."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        timeouts = stage.scenario.config.timeouts
        self._limits_s = {
            AttemptPhase.GRANTING: timeouts.link_s
            + timeouts.heartbeat_s,  # who says nothing for so long is gone
            AttemptPhase.PREFILLING: timeouts.prefill_progress_s,
            AttemptPhase.HANDOFF: timeouts.handoff_s,
            AttemptPhase.RUNNING: timeouts.token_gap_s,
        }
        self._orphans: dict[int, float] = {}  # handle that no router knows -> since when
        self._reported: dict[tuple[object, ...], None] = {}
        self._cancelled: dict[int, float] = {}  # handle -> when its workers must have heard of it
        self._went_on: dict[tuple[int, str], int] = {}  # on a worker -> tokens it had by then

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.look()

    def look(self) -> None:
        """Once."""
        for router in self._stage.cluster.routers.values():
            self._look_at_attempts(router)
            self._look_at_service(router)
        self._look_at_orphans()

    def cancelled(self, handles: Iterable[int]) -> None:
        """Nobody wants these attempts any more: their workers will hear of it soon."""
        delays = self._stage.scenario.delays
        hears_s = self._stage.tape.now_s() + delays.session_s + 3 * delays.owner_s + HEARS_S
        self._cancelled |= dict.fromkeys(handles, hears_s)

    def look_at_cancelled(self, worker: SimWorker) -> None:
        """A worker that has heard of a cancellation computes at most two steps more for it."""
        if not self._cancelled:
            return
        now_s = self._stage.tape.now_s()
        for attempt in attempts_of(worker):
            heard_s = self._cancelled.get(attempt.handle)
            if heard_s is None or now_s < heard_s:
                continue
            key = (attempt.handle, worker.id)
            before = self._went_on.setdefault(key, len(attempt.seq.ids))
            if len(attempt.seq.ids) > before + STEPS_ON and self._is_well(worker, heard_s - LOOK_S):
                self._violate(
                    key, f"{worker.id} goes on with attempt {attempt.handle:016x}, which was cancelled"
                )

    def _is_well(self, worker: SimWorker, since_s: float) -> bool:
        """Whether nothing has kept news from this worker."""
        return self._is_sound(worker.id, since_s) and not any(
            effect.ended_s is None or effect.ended_s > since_s
            for effect in self._stage.ledger.effects
            if effect.routers or any(worker_id == worker.id for worker_id, _ in effect.sessions)
        )

    def _look_at_attempts(self, router: SimRouter) -> None:
        for conductor in () if router.app is None else router.app.conductors:
            for run in conductor.runs:
                attempt = run.attempt
                limit_s = None if attempt is None else self._limits_s.get(attempt.phase)
                if attempt is None or limit_s is None:
                    continue
                age_s = router.clock.now_s() - attempt.phase_clock.progress_s
                if age_s > limit_s + SLACK_S:
                    self._violate(
                        (attempt.handle, attempt.phase),
                        f"{router.id}: attempt {attempt.handle:016x} is {attempt.phase.value} for {age_s:.3f} s, "
                        f"limit {limit_s} s",
                        conductor.request_id.partition(".")[0],
                    )

    def _look_at_orphans(self) -> None:
        """An attempt that no router conducts must leave its workers in time."""
        live: dict[int, None] = {}
        for router in self._stage.cluster.routers.values():
            for conductor in () if router.app is None else router.app.conductors:
                for run in conductor.runs:
                    if run.attempt is not None:
                        live[run.attempt.handle] = None
        now_s = self._stage.tape.now_s()
        orphans: dict[int, float] = {}
        for worker in self._stage.cluster.workers.values():
            for attempt in attempts_of(worker):
                if attempt.handle in live:
                    continue
                since_s = orphans[attempt.handle] = self._orphans.get(attempt.handle, now_s)
                if now_s - since_s > self._lets_go_s(attempt, since_s) and self._is_sound(worker.id, since_s):
                    self._violate(
                        (attempt.handle, worker.id),
                        f"{worker.id}: attempt {attempt.handle:016x} is {attempt.state.value}, and no router knows "
                        f"it for {now_s - since_s:.3f} s",
                    )
        self._orphans = orphans

    def _lets_go_s(self, attempt: DecodeAttempt | PrefillAttempt, since_s: float) -> float:
        """How long a worker may keep an attempt that nobody wants: its peer must let go of the lease first."""
        timeouts = self._stage.scenario.config.timeouts
        limit_s = LETS_GO_S + timeouts.lease_s + SLACK_S
        peer = attempt.source if isinstance(attempt, DecodeAttempt) else attempt.lease.decode_worker
        if peer is None or self._is_sound(peer.id, since_s):
            return limit_s
        return limit_s + UNANSWERED_S + timeouts.link_s

    def _is_sound(self, worker_id: str, since_s: float) -> bool:
        """Whether nothing keeps this worker from acting."""
        return not any(
            worker_id in effect.workers and (effect.ended_s is None or effect.ended_s > since_s)
            for effect in self._stage.ledger.effects
        )

    def _look_at_service(self, router: SimRouter) -> None:
        """With a healthy pair a router serves."""
        app = router.app
        if app is None or not app.fleet.topology.missing or app.admission.draining:
            return
        workers = [worker for worker in self._stage.cluster.workers.values() if not is_stranger(worker.id)]
        decodes = [worker for worker in workers if worker.role is not Role.PREFILL]
        if self._stage.scenario.config.router.pairs_per_prefill < len(decodes):
            return  # the healthy one may not be paired
        now_s = self._stage.tape.now_s()
        for prefill in [worker for worker in workers if worker.role is Role.PREFILL]:
            for decode in decodes:
                if self._stage.ledger.is_healthy(
                    now_s - PAIRS_UP_S, now_s, prefill=prefill.id, decode=decode.id, router=router.id
                ) and self._are_up(prefill, decode, router):
                    self._violate(
                        (router.id, prefill.id, decode.id),
                        f"{router.id} serves nobody though {prefill.id} and {decode.id} are well: "
                        f"{app.fleet.topology.missing}, {app.fleet.topology.pair_reasons()}",
                    )

    def _are_up(self, prefill: SimWorker, decode: SimWorker, router: SimRouter) -> bool:
        return prefill.alive and decode.alive and not (prefill.is_stopped or decode.is_stopped)

    def _violate(self, key: tuple[object, ...], what: str, about: str = "") -> None:
        if key not in self._reported:
            self._reported[key] = None
            self._stage.violate(what, about)
