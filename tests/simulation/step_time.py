"""Steps that take virtual time: while one runs, its engine owner takes no message, and what it says comes after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pdserve.clock import Clock
from pdserve.engine.layout import KvLayout
from pdserve.engine.port import ModelCard, Row, RowOutput, Runner
from pdserve.kv_memory import KvMemory

StepTime = Callable[[Sequence[Row]], float]
"""The seconds that a step with these rows takes."""


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


class TimedRunner:
    """A Runner whose steps take the time that a rule says."""

    def __init__(self, inner: Runner, step_s: StepTime, clock: StepClock) -> None:
        self._inner = inner
        self._step_s = step_s
        self._clock = clock

    @property
    def card(self) -> ModelCard:
        return self._inner.card

    @property
    def layout(self) -> KvLayout:
        return self._inner.layout

    @property
    def pool(self) -> KvMemory:
        return self._inner.pool

    def run(self, rows: Sequence[Row]) -> list[RowOutput]:
        outputs = self._inner.run(rows)
        self._clock.ahead_s += self._step_s(rows)
        return outputs
