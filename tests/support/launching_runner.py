"""The fake model behind `LaunchingRunner`, as late as a device may be: a launched step touches its blocks only when it
is collected. What was done to these blocks in between shows in somebody's text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pdserve.engine.fake_rule import FakeRule
from pdserve.engine.fake_runner import FakeRunner
from pdserve.engine.port import Row, RowOutput


@dataclass(frozen=True)
class LateStep:
    """rows as they were at launch; sources: where unknown tokens come from."""

    rows: list[Row]
    sources: dict[int, int]
    behind: LateStep | None
    outputs: list[RowOutput]


class LateRunner(FakeRunner):
    """Checks the rules of the port."""

    def __init__(self, *, num_blocks: int, block_size: int, eos_one_in: int = 0) -> None:
        super().__init__(num_blocks=num_blocks, block_size=block_size, rule=FakeRule(eos_one_in=eos_one_in))
        self.in_flight: list[LateStep] = []
        self.log: list[str] = []
        self._failure = ""
        self._last: LateStep | None = None

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
        launched.outputs.extend(self.run(rows))
        return list(launched.outputs)


def _copy(row: Row) -> Row:
    sample = row.sample and replace(row.sample, ids=tuple(row.sample.ids))
    return replace(row, token_ids=tuple(row.token_ids), block_table=list(row.block_table), sample=sample)


def _known(row: Row, token_id: int) -> Row:
    assert row.sample is not None
    sample = replace(row.sample, ids=(*row.sample.ids, token_id), num_unknown=0)
    return replace(row, token_ids=(token_id,), sample=sample)
