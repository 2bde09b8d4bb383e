"""A runner whose steps take as long as a rule says: the fake engine as slow as a model, without its work."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pdserve.engine.layout import KvLayout
from pdserve.engine.port import ModelCard, Row, RowOutput, Runner
from pdserve.kv_memory import KvMemory

StepTime = Callable[[Sequence[Row]], float]
"""The seconds that a step with these rows takes."""


class PacedRunner:
    """Implements `Runner`. Engine owner's thread only, which `spend` blocks.

    spend  lets so many seconds pass
    """

    def __init__(self, inner: Runner, step_s: StepTime, spend: Callable[[float], None]) -> None:
        self._inner = inner
        self._step_s = step_s
        self._spend = spend

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
        self._spend(self._step_s(rows))
        return outputs
