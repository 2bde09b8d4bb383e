"""Steps of single tokens as recorded graphs: a launch for the whole model instead of some hundred.

A graph is bound to its number of rows and its tensors, so there is one for each of a few numbers of rows, and a step
takes the next larger one. All are recorded at start: none keeps a request waiting.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable

from torch import Tensor

from pdserve.engine.attention import Span
from pdserve.engine.device.devices import Device, Replay
from pdserve.engine.device.step_tables import FROM_HOST, StepPlan, StepStage, StepTables, TableShape

#: What a graph records: the logits [rows, vocabulary] of a step of single tokens
ComputeLogits = Callable[[StepTables], Tensor]


def row_buckets(max_rows: int) -> list[int]:
    """1, 2, 4, 8, then steps of an eighth at most of what is there by then, and the largest itself: ascending."""
    buckets = [1, 2, 4]
    while buckets[-1] < max_rows:
        buckets.append(buckets[-1] + max(4, 1 << max(0, buckets[-1].bit_length() - 3)))
    return [rows for rows in buckets if rows < max_rows] + [max_rows]


class StepGraphs:
    """Engine owner's thread only."""

    def __init__(
        self, device: Device, stage: StepStage, compute: ComputeLogits, *, max_rows: int, width: int
    ) -> None:
        """Records all graphs. width: block ids that a row may have."""
        self._stage = stage
        self._width = width
        self._buckets = row_buckets(max_rows)
        # The largest first: the others find their scratch in what it needs.
        self._graphs = {
            rows: _Graph(device, stage, compute, TableShape(rows, rows, width, rows))
            for rows in reversed(self._buckets)
        }

    def fits(self, plan: StepPlan) -> bool:
        """Whether there is a graph for such a step."""
        return plan.num_single == len(plan.spans) <= self._buckets[-1]

    def run(self, plan: StepPlan, fill_in: Callable[[StepTables], None]) -> Tensor:
        """Launch a step that fits: the logits [wanted, vocabulary], overwritten by the next one.

        fill_in  puts tokens in place that the host doesn't know
        """
        rows = self._buckets[bisect.bisect_left(self._buckets, len(plan.spans))]
        graph = self._graphs[rows]
        fill_in(self._stage.fill(plan, graph.shape, graph.room))
        return graph.launch()[: len(plan.wanted)]


class _Graph:
    """Of one number of rows."""

    def __init__(self, device: Device, stage: StepStage, compute: ComputeLogits, shape: TableShape) -> None:
        self.shape = shape
        self.room = stage.room(shape)
        trial = StepPlan([Span(0, 1, 0, [stage.spare_block])], [0], [FROM_HOST], [0])
        self._tables = stage.fill(trial, shape, self.room)
        self._compute = compute
        self._logits = compute(self._tables)  # sets up what is made on first use
        self._replay: Replay = device.capture(self._step)

    def _step(self) -> None:
        self._logits = self._compute(self._tables)

    def launch(self) -> Tensor:
        self._replay()
        return self._logits
