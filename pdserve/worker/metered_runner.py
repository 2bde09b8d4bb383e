"""A runner that says when a step begins and ends, and what it took: for the watchdog, and for what answers report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from pdserve.clock import Clock
from pdserve.energy import EnergyMeter
from pdserve.engine.layout import KvLayout
from pdserve.engine.port import ModelCard, Row, RowOutput, Runner
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
        shape = _shape(rows)
        new_shape = shape not in self._shapes
        self._shapes[shape] = None
        self._on_begin(new_shape)
        self.begun_s = self._clock.now_s()
        try:
            return self._runner.run(rows) if self._energy is None else self._run_metered(rows, self._energy)
        finally:
            self.ended_s = self._clock.now_s()
            self.num_steps += 1

    def _run_metered(self, rows: Sequence[Row], meter: EnergyMeter) -> list[RowOutput]:
        before_j = meter.read_j()
        outputs = self._runner.run(rows)
        after_j = meter.read_j()
        if before_j is None or after_j is None:
            return outputs
        num_tokens = max(1, sum(len(row.token_ids) for row in rows))
        per_token_j = (after_j - before_j) / num_tokens
        return [
            replace(output, energy_j=per_token_j * len(row.token_ids))
            for row, output in zip(rows, outputs, strict=True)
        ]


def _shape(rows: Sequence[Row]) -> _Shape:
    """Rows, tokens, scored tokens and the longest context, each as a power of two: what a step's time depends on."""
    num_tokens = sum(len(row.token_ids) for row in rows)
    context = max((row.start + len(row.token_ids) for row in rows), default=0)
    num_scored = sum(len(row.score.next_ids) for row in rows if row.score is not None)
    return len(rows).bit_length(), num_tokens.bit_length(), num_scored.bit_length(), context.bit_length()
