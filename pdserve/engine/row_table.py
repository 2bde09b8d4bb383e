"""Embedding tables, of which a step wants a few rows."""

from __future__ import annotations

from torch import Tensor

from pdserve.engine.stored_matrix import StoredMatrix, StoredRows


class RowTable:
    """A matrix [rows, width] that stays as it is stored, in its file or on a device: rows are decoded when wanted."""

    def __init__(self, matrix: StoredMatrix) -> None:
        """matrix: of one part, its rows as they lie"""
        (part,) = matrix.parts
        assert part.order is None
        self._raw, self._kind = part.raw, part.kind

    def rows(self, ids: Tensor) -> Tensor:
        """[ids, width] as `StoredMatrix.values`, free to be overwritten; ids int64, on the table's device."""
        return StoredRows(self._raw, self._kind, ids).values()
