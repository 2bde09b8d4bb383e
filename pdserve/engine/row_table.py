"""Embedding tables, of which a step wants a few rows."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from pdserve.engine.dequant import decode


class Rows(Protocol):
    """A matrix [rows, width]."""

    def rows(self, ids: Tensor) -> Tensor:
        """[ids, width], free to be overwritten; ids int64, on the table's device."""
        ...


class ResidentTable:
    """One that lies on a device as a whole."""

    def __init__(self, values: Tensor) -> None:
        self.values = values

    def rows(self, ids: Tensor) -> Tensor:
        return self.values.index_select(0, ids)


class RowTable:
    """One that stays in the file: rows are decoded when they are wanted, and the rest is never copied."""

    def __init__(self, raw: Tensor, kind: str, shape: tuple[int, ...]) -> None:
        """raw [nbytes] uint8, a view of the file; rows are whole units of `kind`."""
        self._raw = raw.view(shape[0], -1)
        self._kind = kind

    def rows(self, ids: Tensor) -> Tensor:
        """[ids, width], in the stored dtype or float32 if it was quantised: what `Weights.load` would give of them."""
        return decode(self._raw.index_select(0, ids).view(-1), self._kind).view(len(ids), -1)
