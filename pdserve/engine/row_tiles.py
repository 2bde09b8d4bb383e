"""Deterministic mode's rule for all that works row by row: a kernel never sees another number of rows than a few fixed.

    23 rows   [16][4][3 and a zero row]      counts 4, 16, 64

Kernels choose their way by the number of rows, and a row's last bits follow. With fixed numbers a row meets the same
kernels in prefill, in a chunk, in decode, alone and in company; that the few numbers, and the places within them, give
equal bits is proven at start (`row_proof`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

Params = ParamSpec("Params")
Result = TypeVar("Result")

RowFunction = Callable[..., Tensor]
"""Tensors of equally many rows → one of as many, each row from the same row of the inputs alone."""

MakeInputs = Callable[[Tensor], tuple[Tensor, ...]]

# A decode step of four rows takes little longer than one of one; in 64, a matrix is read as seldom as a prompt needs.
ROW_COUNTS = (4, 16, 64)


def alone(rows: Tensor) -> tuple[Tensor, ...]:
    """The only input, free to be overwritten."""
    return (rows.clone(),)


@dataclass(frozen=True, slots=True)
class RowSubject:
    """A function of rows, and what its proof needs.

    name    subjects of one name are the same kernels on the same shapes; one of them is proven
    width   of the rows that the proof draws
    inputs  makes the function's inputs of such rows, each row from itself alone
    """

    name: str
    function: RowFunction
    width: int
    inputs: MakeInputs = alone
    is_product: bool = False

    def apply(self, rows: Tensor) -> Tensor:
        """The function's result for drawn rows."""
        return self.function(*self.inputs(rows))


class RowTiles:
    """Cuts rows into tiles. Any thread may call what `each` gives, if it may call the function itself.

    counts    allowed numbers of rows, ascending; whoever proves them leaves those that hold
    subjects  what is applied so, by name: to be proven
    uncut     what is applied to any number of rows, since its kernels are made for that: to be proven likewise
    """

    def __init__(self, counts: tuple[int, ...] = ROW_COUNTS) -> None:
        self.counts = counts
        self.subjects: dict[str, RowSubject] = {}
        self.uncut: dict[str, RowSubject] = {}

    def cut(self, num_rows: int) -> list[int]:
        """Sizes of the tiles that hold so many rows, in order; only the last one may have rows to spare."""
        tiles: list[int] = []
        for count in reversed(self.counts):
            while num_rows > (count // 2 if count > self.counts[0] else 0):
                tiles.append(count)
                num_rows -= count
        return tiles

    def each(self, subject: RowSubject) -> RowFunction:
        """The subject's function, one tile after the other."""
        self.subjects.setdefault(subject.name, subject)
        function = subject.function

        def tiled(*inputs: Tensor) -> Tensor:
            num_rows = len(inputs[0])
            if num_rows in self.counts:
                return function(*inputs)
            parts: list[Tensor] = []
            begin = 0
            for count in self.cut(num_rows):
                parts.append(function(*(_tile(rows, begin, count) for rows in inputs)))
                begin += count
            return (torch.cat(parts) if len(parts) > 1 else parts[0])[:num_rows]

        return tiled

    def leave_uncut(self, subject: RowSubject) -> None:
        """To be proven for any number of rows."""
        self.uncut.setdefault(subject.name, subject)


def _tile(rows: Tensor, begin: int, count: int) -> Tensor:
    """Rows [begin, begin + count), zeros behind the last."""
    missing = begin + count - len(rows)
    tile = rows[begin : begin + count]
    return functional.pad(tile, (0, 0) * (rows.dim() - 1) + (0, missing)) if missing > 0 else tile


def undivided(function: Callable[Params, Result]) -> Callable[Params, Result]:
    """The same function on one thread.

    torch cuts elementwise work among threads wherever it wants, in the middle of a row too, and computes what is left
    over before a cut by other instructions than the rest, with other last bits where a function is more than one
    rounding. Which elements these are depends on the number of rows.
    """

    @functools.wraps(function)
    def on_one_thread(*args: Params.args, **kwargs: Params.kwargs) -> Result:
        num_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return function(*args, **kwargs)
        finally:
            torch.set_num_threads(num_threads)

    return on_one_thread
