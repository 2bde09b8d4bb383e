"""A runner that says when a step begins and ends, and what it took: for the watchdog, and for what answers report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pdserve.clock import Clock
from pdserve.energy import EnergyMeter
from pdserve.engine.layout import KvLayout
from pdserve.engine.port import LaunchingRunner, ModelCard, Row, RowOutput, Runner
from pdserve.kv_memory import KvMemory

_Shape = tuple[int, int, int, int]


class MeteredRunner:
    """Another runner, measured. Engine owner only.

    on_begin  told before each step whether no step of its shape ran before: such a step may compile or pack, and
              the watchdog leaves it its time
    energy    the meter of what the runner computes on, if the machine has one. Each row is given the step's joules in
              proportion to its tokens
    begun_s, ended_s, num_steps  clock times of the newest step; number of those that returned or raised
    """

    def __init__(
        self,
        runner: Runner,
        clock: Clock,
        on_begin: Callable[[bool], None],
        energy: EnergyMeter | None = None,
    ) -> None:
        self._runner = runner
        self._clock = clock
        self._on_begin = on_begin
        self._energy = energy
        self._shapes: dict[_Shape, None] = {}
        self.num_steps = 0
        self.begun_s = 0.0
        self.ended_s = 0.0
        self._ended_j: float | None = None

    @property
    def card(self) -> ModelCard:
        return self._runner.card

    @property
    def layout(self) -> KvLayout:
        return self._runner.layout

    @property
    def pool(self) -> KvMemory:
        return self._runner.pool

    @property
    def step_s(self) -> float:
        """Duration of the newest step."""
        return self.ended_s - self.begun_s

    def run(self, rows: Sequence[Row]) -> list[RowOutput]:
        self._begin(rows)
        self.begun_s = self._clock.now_s()
        return self._measured(rows, lambda: self._runner.run(rows), self._read_j())

    def _begin(self, rows: Sequence[Row]) -> None:
        shape = _shape(rows)
        new_shape = shape not in self._shapes
        self._shapes[shape] = None
        self._on_begin(new_shape)

    def _measured(
        self, rows: Sequence[Row], finish: Callable[[], list[RowOutput]], before_j: float | None
    ) -> list[RowOutput]:
        """A step that ends with `finish`; before_j: the meter when it began."""
        try:
            outputs = finish()
        finally:
            self.ended_s = self._clock.now_s()
            self.num_steps += 1
            self._ended_j = self._read_j()
        return self._with_energy(rows, outputs, before_j)

    def _read_j(self) -> float | None:
        return None if self._energy is None else self._energy.read_j()

    def _with_energy(
        self, rows: Sequence[Row], outputs: list[RowOutput], before_j: float | None
    ) -> list[RowOutput]:
        after_j = self._ended_j
        if before_j is None or after_j is None:
            return outputs
        num_tokens = max(1, sum(len(row.token_ids) for row in rows))
        per_token_j = (after_j - before_j) / num_tokens
        return [
            replace(output, energy_j=per_token_j * len(row.token_ids))
            for row, output in zip(rows, outputs, strict=True)
        ]


class MeteredLaunches(MeteredRunner):
    """A runner that launches, measured. A step counts from when it could begin (it was launched, and the one before it
    was read) to when it is read; its joules, too, so that none are lost between steps."""

    def __init__(
        self,
        runner: LaunchingRunner[Any],
        clock: Clock,
        on_begin: Callable[[bool], None],
        energy: EnergyMeter | None = None,
    ) -> None:
        super().__init__(runner, clock, on_begin, energy)
        self._launching = runner
        self._num_in_flight = 0

    def launch(self, rows: Sequence[Row], after: Mapping[int, int] | None = None) -> _Launched:
        self._begin(rows)
        is_first = self._num_in_flight == 0
        launched_s, launched_j = self._clock.now_s(), self._read_j() if is_first else None
        inner = self._launching.launch(rows, after)
        self._num_in_flight += 1
        return _Launched(rows, inner, launched_s, launched_j, is_first)

    def collect(self, launched: _Launched) -> list[RowOutput]:
        self.begun_s = max(launched.launched_s, self.ended_s)
        self._num_in_flight -= 1
        before_j = launched.launched_j if launched.is_first else self._ended_j
        return self._measured(launched.rows, lambda: self._launching.collect(launched.inner), before_j)


def metered(
    runner: Runner, clock: Clock, on_begin: Callable[[bool], None], energy: EnergyMeter | None
) -> MeteredRunner:
    """A runner, measured, that launches if the runner does."""
    if isinstance(runner, LaunchingRunner):
        return MeteredLaunches(runner, clock, on_begin, energy)
    return MeteredRunner(runner, clock, on_begin, energy)


@dataclass(frozen=True, slots=True)
class _Launched:
    """launched_j: the meter at launch, read only if no other step was in flight (is_first)."""

    rows: Sequence[Row]
    inner: Any
    launched_s: float
    launched_j: float | None
    is_first: bool


def _shape(rows: Sequence[Row]) -> _Shape:
    """Rows, tokens, scored tokens and the longest context, each as a power of two: what a step's time depends on."""
    num_tokens = sum(len(row.token_ids) for row in rows)
    context = max((row.start + len(row.token_ids) for row in rows), default=0)
    num_scored = sum(len(row.score.next_ids) for row in rows if row.score is not None)
    return len(rows).bit_length(), num_tokens.bit_length(), num_scored.bit_length(), context.bit_length()
