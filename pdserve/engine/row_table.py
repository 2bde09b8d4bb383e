"""A matrix of which a step wants a few rows: they are decoded from the file then, and the rest is never copied."""

from __future__ import annotations

from torch import Tensor

from pdserve.engine.dequant import decode


class RowTable:
    """An embedding table as it is stored: [rows, width] without being that many numbers in memory."""

    def __init__(self, raw: Tensor, kind: str, shape: tuple[int, ...]) -> None:
        """raw [nbytes] uint8, a view of the file; rows are whole units of `kind`."""
        self._raw = raw.view(shape[0], -1)
        self._kind = kind

    def rows(self, ids: Tensor) -> Tensor:
        """[ids, width], in the stored dtype or float32 if it was quantised: what `Weights.load` would give of them."""
        return decode(self._raw.index_select(0, ids).view(-1), self._kind).view(len(ids), -1)
