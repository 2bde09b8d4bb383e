"""A runner whose steps take as long as they are told: the fake engine as slow as a model, without its work."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pdserve.engine.layout import KvLayout
from pdserve.engine.port import ModelCard, Row, RowOutput, Runner
from pdserve.kv_memory import KvMemory


class PacedRunner:
    """Implements `Runner`. Engine owner's thread only, which `spend` blocks.

    step_s   of every step; token_s: more for each token in it
    """

    def __init__(
        self, inner: Runner, *, step_s: float, token_s: float, spend: Callable[[float], None]
    ) -> None:
        self._inner = inner
        self._step_s = step_s
        self._token_s = token_s
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
        self._spend(self._step_s + self._token_s * sum(len(row.token_ids) for row in rows))
        return outputs
