"""A runner that breaks when it is told to, and that is watched: it may touch only blocks that its rows own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from pdserve.engine.block_pool import BlockPool, BlockState
from pdserve.engine.fake_runner import InjectedFault
from pdserve.engine.layout import KvLayout
from pdserve.engine.port import ModelCard, Row, RowOutput, Runner
from pdserve.errors import RowFailed
from pdserve.kv_memory import KvMemory


class BreakableRunner:
    """A Runner whose next step, or the next step's first row, can be told to fail before it has written anything.

    on_failure  told when that happens: "step" or "row"
    """

    def __init__(self, inner: Runner, on_failure: Callable[[str], None] = lambda what: None) -> None:
        self._inner = inner
        self._on_failure = on_failure
        self.fails_next = False
        self.loses_next_row = False

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
        if self.fails_next:
            self.fails_next = False
            self._on_failure("step")
            raise InjectedFault("this step was told to fail")
        if self.loses_next_row:
            self.loses_next_row = False
            self._on_failure("row")
            rest = self._inner.run(rows[1:]) if len(rows) > 1 else []
            return [RowOutput(error=RowFailed("this row was told to fail")), *rest]
        return self._inner.run(rows)


class WatchedRunner:
    """A Runner that checks the blocks of each row before they are touched.

    pool     the states of the blocks, as the engine owner has them now
    violate  told what was wrong
    weights  fingerprint that it claims instead of its own; "" = its own
    """

    def __init__(
        self,
        inner: Runner,
        pool: Callable[[], BlockPool | None],
        violate: Callable[[str], None],
        weights: str = "",
    ) -> None:
        self._inner = inner
        self._card = replace(inner.card, weights_fingerprint=weights) if weights else inner.card
        self._pool = pool
        self._violate = violate

    @property
    def card(self) -> ModelCard:
        return self._card

    @property
    def layout(self) -> KvLayout:
        return self._inner.layout

    @property
    def pool(self) -> KvMemory:
        return self._inner.pool

    def run(self, rows: Sequence[Row]) -> list[RowOutput]:
        pool = self._pool()
        if pool is not None:
            for row in rows:
                self._check(row, pool)
        return self._inner.run(rows)

    def _check(self, row: Row, pool: BlockPool) -> None:
        """Reads come from owned blocks; what is written belongs to this sequence alone."""
        size = pool.block_size
        end = row.start + len(row.token_ids)
        first_written = row.start // size
        for index, block_id in enumerate(row.block_table[: -(-end // size)]):
            if pool.state(block_id) is not BlockState.OWNED:
                self._violate(f"a step touches block {block_id} while it is {pool.state(block_id).name}")
            elif index >= first_written and pool.num_references(block_id) != 1:
                self._violate(f"a step writes block {block_id}, which {pool.num_references(block_id)} hold")
