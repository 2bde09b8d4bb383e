"""Whether a worker whose session is open still works: messages at all, and a step counter that moves.

gRPC's own keepalive sees a dead connection; it doesn't see an event loop that is stuck, nor an engine that hangs
in a process whose other threads go on answering (failures.md, row 15).
"""

from __future__ import annotations

HANG_MIN_S = 5.0
HANG_STEPS = 10.0  # a step may take so many times the slowest recent one


class Liveness:
    """One session's signs of life. Event-loop thread only.

    silent_s          no message for so long = dead
    late_s            no message for so long = silent for now: stopped, or without a CPU
    stuck_at_steps    an earlier session of this very process ended as hung at this step count: suspect until it moves
    in_step           whether the engine was amid a step that had lasted for a while when it was last heard of
    slowest_step_s    the worker's own figure, of its recent steps
    """

    def __init__(
        self, now_s: float, silent_s: float, late_s: float, stuck_at_steps: int | None = None
    ) -> None:
        self._silent_s = silent_s
        self._late_s = late_s
        self._heard_s = now_s
        self._moved_s = now_s
        self._has_work = False
        self.slowest_step_s = 0.0
        self.in_step = False
        self.num_steps = 0
        self._stuck_at_steps = stuck_at_steps

    @property
    def suspect(self) -> bool:
        """Whether the engine was hanging when this process was last heard of, and hasn't moved since."""
        return self._stuck_at_steps is not None

    def is_silent(self, now_s: float) -> bool:
        """Whether it says nothing at all for now."""
        return now_s - self._heard_s > self._late_s

    def heard(self, now_s: float) -> None:
        """Any message came."""
        self._heard_s = now_s

    def reported_step_time(self, slowest_step_s: float) -> None:
        """The worker's own figure: the slowest of its recent steps."""
        self.slowest_step_s = slowest_step_s

    def heartbeat(self, num_steps: int, has_work: bool, now_s: float, in_step_s: float = 0.0) -> None:
        """The step counter, whether the engine has anything to do, and how long it has been in its present step."""
        if num_steps != self.num_steps or not has_work or not self._has_work:
            self._moved_s = now_s
        if self._stuck_at_steps is not None and (num_steps != self._stuck_at_steps or not has_work):
            self._stuck_at_steps = None
        self.num_steps = num_steps
        self.in_step = in_step_s > 0.0
        self._has_work = has_work

    def why_dead(self, now_s: float) -> str:
        """The sign that is missing; "" = alive."""
        if now_s - self._heard_s > self._silent_s:
            return f"no message for {now_s - self._heard_s:.1f} s"
        # The first step of a process compiles, allocates and reads weights: its length says nothing.
        if self._has_work and self.num_steps > 0 and now_s - self._moved_s > self.hang_s:
            return f"engine hangs: work in hand and no step for {now_s - self._moved_s:.1f} s"
        return ""

    @property
    def hang_s(self) -> float:
        """How long the step counter may stand still while there is work."""
        return max(HANG_MIN_S, HANG_STEPS * self.slowest_step_s)

    @property
    def hangs(self) -> bool:
        """Whether there was work when the counter was last read."""
        return self._has_work
