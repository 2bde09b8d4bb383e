"""Steps that take virtual time: while one runs, its engine owner takes no message, and what it says comes after it."""

from __future__ import annotations

from pdserve.clock import Clock


class StepClock:
    """A worker's clock; inside a turn of the engine owner it is ahead of the simulation by the step's time."""

    def __init__(self, inner: Clock) -> None:
        self._inner = inner
        self.ahead_s = 0.0

    def now_s(self) -> float:
        return self._inner.now_s() + self.ahead_s

    def wall_ns(self) -> int:
        return self._inner.wall_ns() + int(self.ahead_s * 1e9)

    def catch_up(self) -> float:
        """The turn is over: how long it took."""
        took_s, self.ahead_s = self.ahead_s, 0.0
        return took_s

    def spend(self, seconds: float) -> None:
        """A step takes so long."""
        self.ahead_s += seconds
