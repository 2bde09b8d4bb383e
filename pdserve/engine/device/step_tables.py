"""A step's numbers on the device: which positions are computed, where they lie, what each row sees.

They are written into one buffer of the host, which is copied as a whole. A step that has only single tokens may be
padded to a fixed number of rows: those to spare compute position 0 of the spare block.

    tokens   [ a | b | c c c c c ]       rows a and b decode, c is a chunk
    rows     [ a | b | c ]               starts 9 30 16, ends 10 31 21
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pdserve.engine.attention import Span
from pdserve.engine.device.devices import Device

FROM_HOST = -1


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step as the host knows it.

    spans     single tokens first
    tokens    of all spans
    sources   of each token: its place among those that the step before samples, or FROM_HOST
    wanted    tokens whose hidden states are wanted, to make logits of
    """

    spans: Sequence[Span]
    tokens: Sequence[int]
    sources: Sequence[int]
    wanted: Sequence[int]

    @property
    def num_single(self) -> int:
        return sum(1 for span in self.spans if span.length == 1)


@dataclass(frozen=True, slots=True)
class TableShape:
    """Sizes of a step's tables; width: block ids of each row."""

    tokens: int
    rows: int
    width: int
    wanted: int


@dataclass(frozen=True, slots=True)
class StepTables:
    """All int32, parts of one tensor on the device.

    tokens, sources  [tokens] as in `StepPlan`
    positions   [tokens]
    slots       [tokens] where K and V of each token go: block id · block_size + offset
    wanted      [wanted]
    starts, ends  [rows] positions [start, end) are computed in this step, and see what lies before them
    blocks      [rows, width] block ids in logical order; what lies behind a row's own is some block
    """

    tokens: Tensor
    sources: Tensor
    positions: Tensor
    slots: Tensor
    wanted: Tensor
    starts: Tensor
    ends: Tensor
    blocks: Tensor


class StepStage:
    """Brings the numbers of steps to the device. Never waits."""

    def __init__(self, device: Device, block_size: int, spare_block: int) -> None:
        self._device = device
        self._block_size = block_size
        self.spare_block = spare_block

    def natural_shape(self, plan: StepPlan) -> TableShape:
        width = max(len(span.blocks(self._block_size)) for span in plan.spans)
        return TableShape(len(plan.tokens), len(plan.spans), width, len(plan.wanted))

    def room(self, shape: TableShape) -> Tensor:
        """Memory of the device for such tables, to be filled again and again."""
        return torch.empty(_num_values(shape), dtype=torch.int32, device=self._device.torch_device)

    def fill(self, plan: StepPlan, shape: TableShape, room: Tensor) -> StepTables:
        """shape: the natural one, or a larger one whose tokens and rows are as many: of single tokens only."""
        host = self._device.host_buffer(_num_values(shape), torch.int32)
        self._write(_parts(host.numpy(), shape), plan, shape)
        room.copy_(host, non_blocking=True)
        return StepTables(*_parts(room, shape))

    def _write(self, parts: list[npt.NDArray[np.int32]], plan: StepPlan, shape: TableShape) -> None:
        tokens, sources, positions, slots, wanted, starts, ends, blocks = parts
        size, num_tokens = self._block_size, len(plan.tokens)
        tokens[:num_tokens] = plan.tokens
        sources[:num_tokens] = plan.sources
        sources[num_tokens:] = FROM_HOST
        wanted[: len(plan.wanted)] = plan.wanted
        slots[num_tokens:] = self.spare_block * size
        ends[len(plan.spans) :] = 1
        blocks[len(plan.spans) :, 0] = self.spare_block
        for row, span in enumerate(plan.spans):
            own = span.blocks(size)
            blocks[row, : len(own)] = own
            starts[row], ends[row] = span.start, span.end
            here = np.arange(span.start, span.end, dtype=np.int32)
            positions[span.rows] = here
            slots[span.rows] = blocks[row, here // size] * size + here % size


def _num_values(shape: TableShape) -> int:
    return 4 * shape.tokens + shape.wanted + shape.rows * (2 + shape.width)


def _parts(values: Any, shape: TableShape) -> list[Any]:
    """The tables in a tensor or an array [`_num_values`], in the order of `StepTables`."""
    sizes = [*[shape.tokens] * 4, shape.wanted, *[shape.rows] * 2, shape.rows * shape.width]
    ends = list(itertools.accumulate(sizes))
    parts = [values[end - size : end] for size, end in zip(sizes, ends, strict=True)]
    parts[-1] = parts[-1].reshape(shape.rows, shape.width)
    return parts
