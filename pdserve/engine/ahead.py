"""The step that a device computes while the one before it is read: launched with tokens that nobody knows yet.

    launch n │ launch n+1, collect n │ launch n+2, collect n+1 │ …

Row by row, step n + 1 goes on with what step n samples. A sequence that ends with step n has a row in n + 1 all the
same: what it gives is dropped, and until the device has done it the sequence's blocks stay its own (`settle`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pdserve.engine.port import LaunchingRunner, Row, RowOutput, SampleSpec
from pdserve.engine.scheduler import PlannedRow, Scheduler
from pdserve.engine.sequence import Sequence, SequenceState
from pdserve.engine.sequence_blocks import SequenceBlocks


@dataclass(slots=True)
class _Flight:
    """A launched step. outputs, error: neither until the device has been waited for."""

    planned: list[PlannedRow]
    rows: list[Row]
    launched: Any
    outputs: list[RowOutput] | None = None
    error: Exception | None = None


class StepAhead:
    """Engine owner only. At most one step is launched beyond the one that is being run."""

    def __init__(self, runner: LaunchingRunner[Any], scheduler: Scheduler, blocks: SequenceBlocks) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._blocks = blocks
        self._flight: _Flight | None = None

    @property
    def launched(self) -> tuple[list[PlannedRow], list[Row]] | None:
        """The step that has to run next, since it is launched already; None: none is."""
        return None if self._flight is None else (self._flight.planned, self._flight.rows)

    def run(self, planned: list[PlannedRow], rows: list[Row]) -> list[RowOutput]:
        """The outputs of a step: what `launched` says, or another one if it says None. Launches the one behind first,
        if it can be known."""
        current = self._flight or _Flight(planned, rows, self._runner.launch(rows))
        self._flight = None
        if current.error is not None:
            raise current.error
        if current.outputs is not None:
            return current.outputs
        self._flight = self._launch_behind(current.planned)
        return self._runner.collect(current.launched)

    def settle(self, seq: Sequence) -> None:
        """Wait until the device doesn't touch a sequence's blocks any more: they are about to be released.

        What it reports then is raised by the next `run`.
        """
        flight = self._flight
        if flight is None or flight.outputs is not None or all(row.seq is not seq for row in flight.planned):
            return
        try:
            flight.outputs = self._runner.collect(flight.launched)
        except Exception as error:  # kept for the step that it belongs to
            flight.error = error

    def drop_if_dead(self) -> None:
        """Forget the launched step if no sequence in it is left to run."""
        flight = self._flight
        if flight is not None and flight.outputs is not None and not any(map(decodes, flight.planned)):
            self._flight = None

    def _launch_behind(self, before: list[PlannedRow]) -> _Flight | None:
        """A step with all that run, behind one of these rows; None if what it would be depends on what they give."""
        if not self._scheduler.only_decodes:
            return None
        places = {row.seq: place for place, row in enumerate(before)}
        seqs = [seq for seq in self._scheduler.running if seq not in places or not _ends_with_next(seq)]
        if not seqs or not all(_runs_ahead(seq) for seq in seqs):
            return None
        for seq in seqs:
            if self._blocks.is_short(seq, num_unknown=seq in places) and not self._blocks.grow(seq):
                return None
        after = {row: places[seq] for row, seq in enumerate(seqs) if seq in places}
        rows = [_row(seq, num_unknown=seq in places) for seq in seqs]
        planned = [PlannedRow(seq, 1, samples=True) for seq in seqs]
        return _Flight(planned, rows, self._runner.launch(rows, after))


def decodes(row: PlannedRow) -> bool:
    """Whether a row of a step that was launched ahead still counts: its sequence decodes on."""
    return row.seq.state is SequenceState.RUNNING


def _runs_ahead(seq: Sequence) -> bool:
    """Whether its next token can be sampled without knowing which the one before it is."""
    params = seq.key.params
    return not (
        seq.matcher is not None
        or seq.key.bad_word_ids
        or params.repetition_penalty != 1
        or params.presence_penalty
        or params.frequency_penalty
    )


def _ends_with_next(seq: Sequence) -> bool:
    return seq.num_generated + 1 >= seq.key.max_tokens


def _row(seq: Sequence, *, num_unknown: int) -> Row:
    spec = SampleSpec(seq.key, seq.ids, seq.num_prompt_tokens, num_unknown=num_unknown)
    return Row(seq.ids[-1:], len(seq.ids) - 1 + num_unknown, seq.block_table, spec)
