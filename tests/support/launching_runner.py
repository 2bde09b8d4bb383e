"""A runner behind `LaunchingRunner`, as late as a device may be: a launched step touches its blocks only when it is
collected. What was done to these blocks in between shows in somebody's text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pdserve.engine.layout import KvLayout
from pdserve.engine.port import ModelCard, Row, RowOutput, Runner
from pdserve.kv_memory import KvMemory


@dataclass(frozen=True)
class LateStep:
    """rows as they were at launch; sources: where unknown tokens come from."""

    rows: list[Row]
    sources: dict[int, int]
    behind: LateStep | None
    outputs: list[RowOutput]


class LateRunner:
    """Checks the rules of the port."""

    def __init__(self, inner: Runner) -> None:
        self._inner = inner
        self.in_flight: list[LateStep] = []
        self.log: list[str] = []
        self._failure = ""
        self._last: LateStep | None = None

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
        return self._inner.run(rows)

    def launch(self, rows: Sequence[Row], after: Mapping[int, int] | None = None) -> LateStep:
        assert len(self.in_flight) < 2
        copies = [_copy(row) for row in rows]
        for index in after or {}:
            sample = copies[index].sample
            assert len(copies[index].token_ids) == 1
            assert sample is not None and sample.num_unknown == 1
        step = LateStep(copies, dict(after or {}), self._last if after else None, [])
        self.in_flight.append(step)
        self._last = step
        self.log.append(f"launch {len(rows)}{' behind' if after else ''}")
        return step

    def fail_next(self, words: str) -> None:
        """The next step that is collected raises."""
        self._failure = words

    def collect(self, launched: LateStep) -> list[RowOutput]:
        assert self.in_flight.pop(0) is launched
        self.log.append("collect")
        if self._failure:
            raise RuntimeError(self._failure)
        rows = list(launched.rows)
        for index, source in launched.sources.items():
            assert launched.behind is not None
            token_id = launched.behind.outputs[source].token_id
            rows[index] = _known(rows[index], 0 if token_id is None else token_id)
        launched.outputs.extend(self._inner.run(rows))
        return list(launched.outputs)


def _copy(row: Row) -> Row:
    sample = row.sample and replace(row.sample, ids=tuple(row.sample.ids))
    return replace(row, token_ids=tuple(row.token_ids), block_table=list(row.block_table), sample=sample)


def _known(row: Row, token_id: int) -> Row:
    assert row.sample is not None
    sample = replace(row.sample, ids=(*row.sample.ids, token_id), num_unknown=0)
    return replace(row, token_ids=(token_id,), sample=sample)
