"""Where an attempt is, since when, and how long it may stay there without progress: protocol.md, "Time"."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from pdserve.clock import Clock
from pdserve.errors import WorkerLost
from pdserve.service.config import TimeoutsConfig
from router.member import Member
from router.progress_timer import ProgressTimer


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
        self._timeouts = timeouts
        self._clock = clock
        self._prefill = prefill
        self._decode = decode
        self._on_late = on_late
        self._written_s = self.progress_s
        self._timer = ProgressTimer(clock, self._expired)
        self._limits_s = {
            AttemptPhase.GRANTING: timeouts.grant_s,
            AttemptPhase.PREFILLING: timeouts.prefill_progress_s,
            AttemptPhase.HANDOFF: timeouts.handoff_s,
            AttemptPhase.RUNNING: timeouts.token_gap_s,
        }
        self._arm()

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

    def _arm(self) -> None:
        limit_s = self._limits_s.get(self.phase)
        if limit_s is None:
            self._timer.stop()
        else:
            self._timer.restart(limit_s)

    def _expired(self) -> None:
        match self.phase:
            case AttemptPhase.GRANTING:
                left_s = self._grant_left_s()
                if left_s > 1e-6:
                    self._timer.restart(left_s)
                    return
                self._decode.refusing = True  # nor is anything else sent there before it reports again
                what, worker = "no answer to StartDecode", self._decode
            case AttemptPhase.PREFILLING:
                what, worker = "no prefill progress", self._prefill or self._decode
            case AttemptPhase.HANDOFF:
                what, worker = "no verdict on the hand-off", self._decode
            case _:
                what, worker = "no token", self._decode
        self._on_late(WorkerLost(f"{what} in time", after_s=self._limits_s[self.phase], worker=worker.ref))

    def _grant_left_s(self) -> float:
        """How much longer the decode worker may leave StartDecode without an answer.

        While it says nothing at all, not even that it lives, silence about one attempt means nothing: its session ends,
        or it comes back, and then its time starts over. In total it has no longer than a silent session would live.
        """
        now_s = self._clock.now_s()
        awake_since_s = self._decode.liveness.awake_since_s(now_s)
        if awake_since_s is None:
            left_s = self._timeouts.grant_s / 2
        else:
            left_s = max(self._written_s, awake_since_s) + self._timeouts.grant_s - now_s
        return min(left_s, self._written_s + self._timeouts.link_s - now_s)
