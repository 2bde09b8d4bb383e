"""Things that break when they are told to."""

from __future__ import annotations

from collections.abc import Sequence

from kv_transfer.kind import Kind
from kv_transfer.transports.faulty import Action
from pdserve.engine.fake_runner import InjectedFault
from pdserve.engine.layout import KvLayout
from pdserve.engine.port import ModelCard, Row, RowOutput, Runner


class BreakableRunner:
    """A Runner whose next step can be told to fail, before it has written anything."""

    def __init__(self, inner: Runner) -> None:
        self._inner = inner
        self.fails_next = False

    @property
    def card(self) -> ModelCard:
        return self._inner.card

    @property
    def layout(self) -> KvLayout:
        return self._inner.layout

    @property
    def pool(self) -> memoryview:
        return self._inner.pool

    def run(self, rows: Sequence[Row]) -> list[RowOutput]:
        if self.fails_next:
            self.fails_next = False
            raise InjectedFault("this step was told to fail")
        return self._inner.run(rows)


class CorruptOnDemand:
    """A fault plan that corrupts the next `num_left` pieces that a worker sends, on any link."""

    def __init__(self) -> None:
        self.num_left = 0

    def decide(self, kind: Kind, _index: int) -> Action | None:
        if kind is Kind.DATA and self.num_left > 0:
            self.num_left -= 1
            return Action.CORRUPT
        return None
