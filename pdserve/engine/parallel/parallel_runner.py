"""A model whose parts are computed by several processes, as the engine sees it: one runner.

    engine ── run(rows) ─► ParallelRunner, in the worker's process
                              ├─ the step's orders ─► rank 1: a runner that computes its part
                              ├─ the step's orders ─► rank 2: …                │ sums, logits (Team)
                              └─ run(rows) ─────────► rank 0's runner ◄────────┘ → samples

Rank 0 alone samples: what the others have to know of it comes with the next step's rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from pdserve.engine.layout import KvLayout
from pdserve.engine.parallel.shard import KvPart
from pdserve.engine.parallel.step_orders import decode_step, encode_step
from pdserve.engine.port import ModelCard, Row, RowOutput, Runner, sort_out
from pdserve.kv_memory import KvMemory


class Follower(Protocol):
    """The runner of a rank that isn't the first."""

    def follow(self, rows: Sequence[Row]) -> None:
        """Compute this rank's part of a step: all that `Runner.run` computes, but nothing is sampled."""
        ...


class ParallelRunner:
    """Implements `Runner` over rank 0's runner, as this does. `run` raises OSError if another rank has gone."""

    def __init__(
        self,
        first: Runner,
        whole: KvLayout,
        part: KvPart,
        size: int,
        tell_others: Callable[[bytes], None],
    ) -> None:
        """first: rank 0's runner, whose pool is `part` of `whole`; tell_others: gives all other ranks one step."""
        self._first = first
        self._layout = whole
        self._part = part
        self._tell_others = tell_others
        self._card = replace(
            first.card,
            numerics=f"{first.card.numerics}/tp{size}",
            step_errors_are_sound=False,  # the other ranks may be in the middle of the step
        )

    @property
    def card(self) -> ModelCard:
        return self._card

    @property
    def layout(self) -> KvLayout:
        return self._layout

    @property
    def pool(self) -> KvMemory:
        return self._first.pool

    def run(self, rows: Sequence[Row]) -> list[RowOutput]:
        """See `Runner.run`. A row with an id or block out of range fails alone, before any rank computes."""
        outputs, sound = sort_out(rows, self._card, self._layout)
        if not sound:
            return outputs
        self._tell_others(encode_step([rows[index] for index in sound], self._layout.block_size))
        own = [in_part(rows[index], self._part) for index in sound]
        for index, output in zip(sound, self._first.run(own), strict=True):
            outputs[index] = output
        return outputs


def follow_step(follower: Follower, part: KvPart, order: bytes) -> None:
    """Compute one step that rank 0 told of."""
    follower.follow([in_part(row, part) for row in decode_step(order)])


def in_part(row: Row, part: KvPart) -> Row:
    """A row over a part's pool."""
    return row if part.parts == 1 else replace(row, block_table=part.table(row.block_table))
