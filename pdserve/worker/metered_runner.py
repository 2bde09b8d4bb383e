"""A runner that says when it begins and how long it took: for the watchdog, the load report and the metrics."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pdserve.clock import Clock
from pdserve.engine.layout import KvLayout
from pdserve.engine.port import ModelCard, Row, RowOutput, Runner

_NEWEST_WEIGHT = 0.2


class MeteredRunner:
    """Another runner, measured. Engine owner only.

    on_begin  told before each step whether no step of its shape ran before: such a step may compile or pack
    step_s, num_steps, prefill_tokens_per_s  of the newest step, of all, and smoothed over the steps with prompts
    """

    def __init__(self, runner: Runner, clock: Clock, on_begin: Callable[[bool], None]) -> None:
        self._runner = runner
        self._clock = clock
        self._on_begin = on_begin
        self._shapes: dict[tuple[int, int, int], None] = {}
        self.num_steps = 0
        self.step_s = 0.0
        self.begun_s = 0.0
        self.ended_s = 0.0
        self.prefill_tokens_per_s = 0.0
        self.num_prefill_tokens = 0

    @property
    def card(self) -> ModelCard:
        return self._runner.card

    @property
    def layout(self) -> KvLayout:
        return self._runner.layout

    @property
    def pool(self) -> memoryview:
        return self._runner.pool

    def run(self, rows: Sequence[Row]) -> list[RowOutput]:
        shape = _shape(rows)
        new_shape = shape not in self._shapes
        self._shapes[shape] = None
        self._on_begin(new_shape)
        self.begun_s = self._clock.now_s()
        outputs = self._runner.run(rows)
        self.ended_s = self._clock.now_s()
        self.num_steps += 1
        self.step_s = self.ended_s - self.begun_s
        num_prefill = sum(len(row.token_ids) for row in rows if len(row.token_ids) > 1)
        if num_prefill:
            self._note_prefill(num_prefill)
        return outputs

    def _note_prefill(self, num_tokens: int) -> None:
        self.num_prefill_tokens += num_tokens
        if self.step_s <= 0.0:
            return
        rate = num_tokens / self.step_s
        old = self.prefill_tokens_per_s
        self.prefill_tokens_per_s = rate if old == 0.0 else old + _NEWEST_WEIGHT * (rate - old)


def _shape(rows: Sequence[Row]) -> tuple[int, int, int]:
    """Rows, tokens and the longest context, each as a power of two: what decides how long a step takes."""
    num_tokens = sum(len(row.token_ids) for row in rows)
    context = max((row.start + len(row.token_ids) for row in rows), default=0)
    return len(rows).bit_length(), num_tokens.bit_length(), context.bit_length()
