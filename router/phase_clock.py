"""Where an attempt is, since when, and how long it may stay there without progress: protocol.md, "Time".

A time-out is for what a worker has lost, not for how slow the worker is. One that is dead, silent or hung is judged by
its session (liveness.py), and its attempts learn of that; one that says nothing for now, or is amid a long step, gives
its attempts their full time again; and no limit is shorter than some of its slowest steps of late. While a decode
worker is asked, and while it lets the attempt wait, only the session and the client's deadline count.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from pdserve.clock import Clock
from pdserve.errors import WorkerLost
from pdserve.service.config import TimeoutsConfig
from router.member import Member
from router.progress_timer import ProgressTimer

SLOW_STEPS = (
    10.0  # an attempt has its turn within so many steps, whoever else is there; as liveness.HANG_STEPS
)


class AttemptPhase(Enum):
    """Where an attempt is, as far as the router knows."""

    GRANTING = "granting"
    WAITING = "waiting"
    QUEUED = "queued"
    PREFILLING = "prefilling"
    HANDOFF = "handoff"
    RUNNING = "running"
    PREEMPTED = "preempted"
    ENDED = "ended"


_TOLD = {
    AttemptPhase.PREFILLING: ("no prefill progress", "timeouts.prefill_progress_s, engine.max_step_tokens"),
    AttemptPhase.HANDOFF: ("no verdict on the hand-off", "timeouts.handoff_s"),
    AttemptPhase.RUNNING: ("no token", "timeouts.token_gap_s"),
}


class PhaseClock:
    """Begins in GRANTING: StartDecode is written in this moment. Event-loop thread only.

    prefill   None = the decode worker prefills
    on_late   called once with the error of the phase whose time is over
    progress_s  since when it is in this phase, or without progress in it
    """

    def __init__(
        self,
        timeouts: TimeoutsConfig,
        clock: Clock,
        prefill: Member | None,
        decode: Member,
        on_late: Callable[[WorkerLost], None],
    ) -> None:
        self.phase = AttemptPhase.GRANTING
        self.is_stuck_logged = False
        self.progress_s = clock.now_s()
        self._clock = clock
        self._prefill = prefill
        self._decode = decode
        self._on_late = on_late
        self._timer = ProgressTimer(clock, self._expired)
        self._limits_s = {
            AttemptPhase.PREFILLING: timeouts.prefill_progress_s,
            AttemptPhase.HANDOFF: timeouts.handoff_s,
            AttemptPhase.RUNNING: timeouts.token_gap_s,
        }

    def enter(self, phase: AttemptPhase) -> None:
        """Into a phase; nothing happens if it is this one already."""
        if phase is not self.phase:
            self.phase = phase
            self.is_stuck_logged = False
            self.progress_s = self._clock.now_s()
            self._arm()

    def progress(self, phase: AttemptPhase) -> None:
        """There was progress, if this is the phase: its time starts over."""
        if phase is self.phase:
            self.progress_s = self._clock.now_s()
            self._arm()

    @property
    def _awaited(self) -> Member:
        """Who has to say something next."""
        if self.phase is AttemptPhase.PREFILLING and self._prefill is not None:
            return self._prefill
        return self._decode

    def _arm(self) -> None:
        limit_s = self._limits_s.get(self.phase)
        if limit_s is None:
            self._timer.stop()
        else:
            self._timer.restart(max(limit_s, SLOW_STEPS * self._awaited.liveness.slowest_step_s))

    def _expired(self) -> None:
        life, now_s = self._awaited.liveness, self._clock.now_s()
        if life.in_step or life.is_silent(now_s):
            self._arm()
            return
        what, settings = _TOLD[self.phase]
        self._on_late(
            WorkerLost(
                f"{what} in time",
                after_s=round(now_s - self.progress_s, 3),
                worker=self._awaited.ref,
                settings=settings,
            )
        )
