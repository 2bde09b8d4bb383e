"""A model whose parts are computed by several processes, as the engine sees it: one runner.

    engine ── run(rows) ─► ParallelRunner, in the worker's process
                              ├─ the step's orders ─► rank 1: a runner that computes its part
                              ├─ the step's orders ─► rank 2: …                │ sums, logits (Team)
                              └─ run(rows) ─────────► rank 0's runner ◄────────┘ → samples

Rank 0 alone samples: what the others have to know of it comes with the next step's rows, or, where that step is
launched before anybody knows, from rank 0's device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from pdserve.engine.layout import KvLayout
from pdserve.engine.parallel.shard import KvPart
from pdserve.engine.parallel.step_orders import StepReader, StepWriter
from pdserve.engine.port import LaunchingRunner, ModelCard, Row, RowOutput, Runner, sort_out
from pdserve.kv_memory import KvMemory


class Follower(Protocol):
    """The runner of a rank that isn't the first."""

    def follow(self, rows: Sequence[Row], after: Mapping[int, int]) -> None:
        """Compute this rank's part of a step: all that `Runner.run` computes, but nothing is sampled.

        after  as of `LaunchingRunner.launch`; empty if this isn't one
        """
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
        pool: KvMemory | None = None,
    ) -> None:
        """
        first        rank 0's runner; whole: the layout of what all ranks have
        part         which part of the pool is rank 0's, if all share one; else it is all of its own (`WHOLE`)
        tell_others  gives all other ranks one step
        pool         the whole one, if it isn't rank 0's
        """
        self._first = first
        self._layout = whole
        self._tables = PartTables(part)
        self._pool = pool or first.pool
        self._writer = StepWriter(whole.block_size)
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
        return self._pool

    def run(self, rows: Sequence[Row]) -> list[RowOutput]:
        """See `Runner.run`. A row with an id or block out of range fails alone, before any rank computes."""
        outputs, sound = sort_out(rows, self._card, self._layout)
        if not sound:
            return outputs
        own = self._told([rows[index] for index in sound])
        for index, output in zip(sound, self._first.run(own), strict=True):
            outputs[index] = output
        return outputs

    def _told(self, rows: Sequence[Row], after: Mapping[int, int] | None = None) -> list[Row]:
        """The step as rank 0 computes it, once the others know of it."""
        self._tell_others(self._writer.write(rows, after))
        return self._tables.of(rows)


class ParallelLaunches(ParallelRunner):
    """A `ParallelRunner` over ranks that launch: implements `LaunchingRunner`."""

    def __init__(
        self,
        first: LaunchingRunner[Any],
        whole: KvLayout,
        part: KvPart,
        size: int,
        tell_others: Callable[[bytes], None],
        pool: KvMemory | None = None,
        gpus: tuple[int, ...] = (),
    ) -> None:
        """gpus: of all ranks; the others as of `ParallelRunner`."""
        super().__init__(first, whole, part, size, tell_others, pool)
        self._card = replace(self._card, gpus=gpus)
        self._launching = first
        self._places: dict[int, int] = {}

    def run(self, rows: Sequence[Row]) -> list[RowOutput]:
        return self.collect(self.launch(rows))

    def launch(self, rows: Sequence[Row], after: Mapping[int, int] | None = None) -> _Launched:
        """See `LaunchingRunner.launch`."""
        outputs, sound = sort_out(rows, self._card, self._layout)
        if not sound:
            return _Launched(outputs, sound, None)
        # Rows that failed are told to nobody. Behind one of them there is nothing to go on with: any token does.
        known = {
            place: self._places.get(after[index], 0)
            for place, index in enumerate(sound)
            if after and index in after
        }
        self._places = {index: place for place, index in enumerate(sound)}
        own = self._told([rows[index] for index in sound], known)
        return _Launched(outputs, sound, self._launching.launch(own, known))

    def collect(self, launched: _Launched) -> list[RowOutput]:
        """See `LaunchingRunner.collect`."""
        if launched.inner is not None:
            for index, output in zip(launched.sound, self._launching.collect(launched.inner), strict=True):
                launched.outputs[index] = output
        return launched.outputs


@dataclass(frozen=True, slots=True)
class _Launched:
    """inner: of rank 0's runner; None: no row was computed."""

    outputs: list[RowOutput]
    sound: list[int]
    inner: Any


class PartTables:
    """Rows over a part's pool. Of a row whose table is the list that one of the step before had, and so has only grown,
    the part's table is the same list, too, which has grown as much: attention keeps what it has made for it."""

    def __init__(self, part: KvPart) -> None:
        self._part = part
        self._last: dict[
            int, tuple[Sequence[int], list[int]]
        ] = {}  # by identity, which lasts as long as it is here

    def of(self, rows: Sequence[Row]) -> list[Row]:
        """Of one step."""
        if self._part.parts == 1:
            return list(rows)
        last, self._last = self._last, {}
        found: list[Row] = []
        for row in rows:
            whole = row.block_table
            _, own = last.get(id(whole), (whole, []))
            own += self._part.table(whole[len(own) :])
            self._last[id(whole)] = whole, own
            found.append(replace(row, block_table=own))
        return found


class Following:
    """One rank's steps, as rank 0 tells of them."""

    def __init__(self, follower: Follower, part: KvPart) -> None:
        """part: as of `ParallelRunner`, this rank's."""
        self._follower = follower
        self._tables = PartTables(part)
        self._reader = StepReader()

    def step(self, order: bytes) -> None:
        """Compute one."""
        rows, after = self._reader.read(order)
        self._follower.follow(self._tables.of(rows), after)
