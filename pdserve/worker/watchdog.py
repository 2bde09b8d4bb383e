"""Finds an engine that hangs while its process lives."""

from __future__ import annotations

from collections import deque

from pdserve.worker.messages import EngineBeat, StepBegun

_LEAST_S = 5.0
_SLOWEST_FACTOR = 10.0
_NUM_RECENT = 256
_SILENT_BEATS = 2.5  # an owner has a turn, and says so, at each heartbeat


class Watchdog:
    """Work in hand and an unchanged step counter, for longer than any recent step explains: the engine hangs.

    So it does if its owner says nothing at all for so long: what was sent to it is work that nobody else can see.

    Loop only. Time is counted in ticks of the caller's heartbeat: a process that was stopped and continued, or a
    loop that stood still itself, sees one late tick and not a silent engine.
    """

    def __init__(self, heartbeat_s: float) -> None:
        self._heartbeat_s = heartbeat_s
        self._recent_s: deque[float] = deque(maxlen=_NUM_RECENT)
        self._num_steps = 0
        self._has_work = False
        self._new_shape = False
        self._in_step = False
        self._unchanged_s = 0.0
        self._silent_s = 0.0
        self._in_step_s = 0.0

    @property
    def limit_s(self) -> float:
        """How long the counter may stand still now."""
        return max(_LEAST_S, _SLOWEST_FACTOR * max(self._recent_s, default=0.0))

    @property
    def num_steps(self) -> int:
        return self._num_steps

    @property
    def expects_step(self) -> bool:
        """Whether the step counter should move: what a heartbeat says as `has_work`."""
        is_silent = self._silent_s > _SILENT_BEATS * self._heartbeat_s
        return (self._has_work or is_silent) and not self._new_shape

    @property
    def in_step_s(self) -> float:
        """How long it has been in its present step; 0 = it isn't in one."""
        return self._in_step_s

    def is_busy_for(self, wait_s: float) -> bool:
        """Whether the engine is in a step that may well last so long."""
        return self._in_step and (self._new_shape or max(self._recent_s, default=0.0) >= wait_s)

    def on_step_begun(self, begun: StepBegun) -> None:
        self._in_step = True
        self._in_step_s = 0.0
        self._silent_s = 0.0
        self._has_work = True
        self._new_shape = begun.new_shape

    def on_beat(self, beat: EngineBeat) -> None:
        if beat.num_steps != self._num_steps:
            self._recent_s.append(beat.step_s)
            self._unchanged_s = 0.0
        self._in_step = False
        self._in_step_s = 0.0
        self._silent_s = 0.0
        self._new_shape = False
        self._num_steps = beat.num_steps
        self._has_work = beat.has_work

    def tick(self) -> float | None:
        """One heartbeat has passed. Returns the seconds without a sign of the engine if it hangs, else None."""
        if self._in_step:
            self._in_step_s += self._heartbeat_s
        if self._new_shape:
            self._unchanged_s = self._silent_s = 0.0
            return None
        self._silent_s += self._heartbeat_s
        self._unchanged_s = self._unchanged_s + self._heartbeat_s if self._has_work else 0.0
        worst_s = max(self._unchanged_s, self._silent_s)
        return worst_s if worst_s > self.limit_s else None
