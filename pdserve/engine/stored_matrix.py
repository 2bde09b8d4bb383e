"""Weight matrices as they are stored: rows of one tensor or of several, in any order, decoded only when asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from pdserve.engine.dequant import PLAIN, decode
from pdserve.modelstore.grouped_types import UNITS


@dataclass(frozen=True, slots=True, eq=False)
class StoredRows:
    """Some rows of one tensor.

    raw    [stored rows, bytes of a row] uint8: a view of the file
    kind   how they are stored: a name of grouped_types.UNITS
    order  [rows] int64: which of them; None = all, as they lie
    """

    raw: Tensor
    kind: str
    order: Tensor | None = None

    def __len__(self) -> int:
        return len(self.raw if self.order is None else self.order)

    def places(self) -> Tensor:
        """[rows] int64: of each row among those stored."""
        return torch.arange(len(self.raw)) if self.order is None else self.order

    def values(self) -> Tensor:
        """[rows, width] in the stored dtype, float32 if they are quantised; a view of the file where that can be."""
        return decode(self.gathered().view(-1), self.kind).view(len(self), -1)

    def gathered(self) -> Tensor:
        """[rows, bytes of a row] uint8: what is stored of these rows alone; a view of it where that can be."""
        return self.raw if self.order is None else self.raw.index_select(0, self.order)

    def columns(self, begin: int, end: int, width: int) -> StoredRows:
        """Columns [begin, end) of `width`, whole units: a copy of them."""
        row_bytes = self.raw.shape[1]
        return StoredRows(
            self.gathered()[:, begin * row_bytes // width : end * row_bytes // width].contiguous(), self.kind
        )

    def between(self, begin: int, end: int) -> StoredRows:
        """Rows [begin, end) of them."""
        if self.order is None:
            return StoredRows(self.raw[begin:end], self.kind)
        return StoredRows(self.raw, self.kind, self.order[begin:end])


class StoredMatrix:
    """[rows, width]; each method gives another matrix. Only `values` and `columns` read any of it."""

    def __init__(self, parts: Sequence[StoredRows], width: int) -> None:
        """parts: one upon the other"""
        self.parts = tuple(parts)
        self.shape = (sum(map(len, parts)), width)

    @classmethod
    def of(cls, raw: Tensor, kind: str, shape: tuple[int, int]) -> StoredMatrix:
        """raw [nbytes] uint8, all rows one after the other"""
        return cls([StoredRows(raw.view(shape[0], -1), kind)], shape[1])

    @classmethod
    def plain(cls, values: Tensor) -> StoredMatrix:
        """values [rows, width] contiguous, of a plain type; not copied"""
        kind = next(name for name, dtype in PLAIN.items() if dtype is values.dtype)
        return cls.of(values.view(-1).view(torch.uint8), kind, (len(values), values.shape[1]))

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def is_quantised(self) -> bool:
        """Whether all of it is stored in blocks of a few bits."""
        return all(part.kind not in PLAIN for part in self.parts)

    def values(self) -> Tensor:
        """See `StoredRows.values`; of parts in several dtypes, that which holds all."""
        parts = [part.values() for part in self.parts]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def reordered(self, reorder: Callable[[Tensor], Tensor]) -> StoredMatrix:
        """The rows of a matrix of one part in another order.

        reorder  what to do to [rows] int64 to have them in that order
        """
        (part,) = self.parts
        return StoredMatrix([StoredRows(part.raw, part.kind, reorder(part.places()))], self.shape[1])

    def rows(self, begin: int, end: int) -> StoredMatrix:
        """Rows [begin, end)."""
        starts = accumulate((len(part) for part in self.parts), initial=0)
        cut = [
            part.between(max(0, begin - start), min(len(part), end - start))
            for part, start in zip(self.parts, starts, strict=False)
            if begin < start + len(part) and start < end
        ]
        return StoredMatrix(cut, self.shape[1])

    def columns(self, begin: int, end: int) -> StoredMatrix:
        """Columns [begin, end). They are copied as they are stored, unless a stored unit lies across an end of them:
        then the matrix is decoded, and these columns of it kept."""
        width = self.shape[1]
        if (begin, end) == (0, width):
            return self
        units = [UNITS[part.kind].num_values for part in self.parts]
        if all(begin % unit == end % unit == 0 for unit in units):
            return StoredMatrix([part.columns(begin, end, width) for part in self.parts], end - begin)
        return StoredMatrix.plain(self.values()[:, begin:end].contiguous())

    def split(self, sizes: Sequence[int] | int) -> list[StoredMatrix]:
        """As of `Tensor`, of a matrix of one part."""
        (part,) = self.parts
        if isinstance(sizes, int):
            sizes = [min(sizes, len(part) - begin) for begin in range(0, len(part), sizes)]
        ends = (0, *accumulate(sizes))
        return [StoredMatrix([part.between(begin, end)], self.shape[1]) for begin, end in pairwise(ends)]
