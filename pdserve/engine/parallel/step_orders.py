"""A step as rank 0 tells it to the others: what is computed where, not what is sampled.

A block table is told once: of a row that goes on with the table that a row of the step before had, only the blocks
behind that one's are told. So the follower's table is one list as long as rank 0's is, by which attention knows a step
that follows another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from pdserve.engine.port import Row, SampleSpec, ScoreSpec
from pdserve.sampling import SampleKey, SamplingParams

# Of a row that samples: followers compute what it samples from, and rank 0 samples.
_ANY = SampleSpec(
    SampleKey(params=SamplingParams(), seed=0, choice=0, eos_token_ids=(), max_tokens=1), (0,), 1
)


class _RowOrder(msgspec.Struct, array_like=True, frozen=True):
    """
    kept       which row of the step before had its block table; −1: none
    block_ids  behind those, of the blocks that the step needs
    scored     what `ScoreSpec` has, without what is named beside
    after      as in `LaunchingRunner.launch`; −1: its token is known
    """

    token_ids: list[int]
    start: int
    kept: int
    block_ids: list[int]
    samples: bool
    scored: tuple[int, list[int]] | None
    after: int


_decoder = msgspec.msgpack.Decoder(list[_RowOrder])


class StepWriter:
    """Rank 0's side. Every step is to be sent, in order."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        # By its table's identity: a row of the last step, its table (which stays so what it is), its blocks told.
        self._last: dict[int, tuple[int, Sequence[int], int]] = {}

    def write(self, rows: Sequence[Row], after: Mapping[int, int] | None = None) -> bytes:
        """Rows that fit (`misfit`); after: which of them go on with the token of which row of the last step."""
        last, self._last = self._last, {}
        orders: list[_RowOrder] = []
        for index, row in enumerate(rows):
            table = row.block_table
            need = -(-(row.start + len(row.token_ids)) // self._block_size)
            kept, _, told = last.pop(id(table), (-1, table, 0))
            self._last[id(table)] = index, table, max(told, need)
            orders.append(
                _RowOrder(
                    list(row.token_ids),
                    row.start,
                    kept,
                    list(table[told:need]),
                    row.sample is not None,
                    None if row.score is None else (row.score.first, list(row.score.next_ids)),
                    (after or {}).get(index, -1),
                )
            )
        return msgspec.msgpack.encode(orders)


class StepReader:
    """A follower's side."""

    def __init__(self) -> None:
        self._tables: list[list[int]] = []

    def read(self, data: bytes) -> tuple[list[Row], dict[int, int]]:
        """The rows to compute, and `after` as it was told."""
        orders = _decoder.decode(data)
        tables = [[] if order.kept < 0 else self._tables[order.kept] for order in orders]
        self._tables = tables
        for order, table in zip(orders, tables, strict=True):
            table += order.block_ids
        rows = [
            Row(
                order.token_ids,
                order.start,
                table,
                _ANY if order.samples else None,
                None if order.scored is None else ScoreSpec(order.scored[1], order.scored[0], 0),
            )
            for order, table in zip(orders, tables, strict=True)
        ]
        return rows, {index: order.after for index, order in enumerate(orders) if order.after >= 0}
