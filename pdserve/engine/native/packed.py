"""Products with quantised weights where they lie in their file, by bytes: kernels/packed.c.

Nothing is made of a weight but a table of its rows' addresses, so workers of one host share its pages. Rows may come
from several tensors, in any order. What a row of activations gives depends on that row alone, as in linear.py.
"""

from __future__ import annotations

import mmap

import torch
from torch import Tensor
from torch.nn import functional

from pdserve.engine.native.library import Kernels
from pdserve.engine.stored_matrix import StoredMatrix, StoredRows

# All quantised formats that can be decoded, by their numbers in kernels/stored.h.
_KINDS = {"Q8_0": 0, "Q4_0": 1, "Q4_1": 2, "Q5_0": 3, "Q5_1": 4, "Q4_K": 5, "Q5_K": 6, "Q6_K": 7}
_STRIP, _GROUP, _GROUP_BYTES = 16, 32, 48


class PackedLinear:
    """x · Wᵀ + b:  [tokens, width] → [tokens, outputs], both in the kernels' activations; see `Linear`."""

    def __init__(self, kernels: Kernels, matrix: StoredMatrix, bias: Tensor | None) -> None:
        """matrix: quantised; bias [outputs]"""
        self._call = kernels.functions.pd_packed_linear
        self._activations = kernels.activations
        self.outputs, self.width = matrix.shape
        self._files = [_read(part.raw) for part in matrix.parts]
        self._addresses = [_addresses(part) for part in matrix.parts]
        self._segments = torch.tensor(
            [
                (addresses.data_ptr(), _KINDS[part.kind], len(part))
                for part, addresses in zip(matrix.parts, self._addresses, strict=True)
            ]
        )
        self._bias = None if bias is None else bias.to(torch.float32).contiguous()
        self.num_segments = len(self._segments)
        self.segments_at = self._segments.data_ptr()
        self.bias_at = None if self._bias is None else self._bias.data_ptr()
        #: a row of activations as bytes
        self.room_bytes = self.width // _GROUP * _GROUP_BYTES

    def __call__(self, x: Tensor) -> Tensor:
        if not x.is_contiguous():
            x = x.contiguous()
        num_rows = len(x)
        assert x.dtype is self._activations and x.shape[1] == self.width, (x.dtype, x.shape, self.width)
        y = torch.empty(num_rows, self.outputs, dtype=self._activations)
        room = torch.empty(num_rows * self.room_bytes, dtype=torch.uint8)
        self._call(
            x.data_ptr(),
            room.data_ptr(),
            self.segments_at,
            self.bias_at,
            y.data_ptr(),
            self.num_segments,
            num_rows,
            self.outputs,
            self.width,
            torch.get_num_threads(),
        )
        return y


def _read(raw: Tensor) -> Tensor:
    """Look at each page, so that the first request needn't wait for a disk."""
    raw[:, :: mmap.PAGESIZE].max()
    return raw


def _addresses(part: StoredRows) -> Tensor:
    """Of each row; the last one's again until strips are whole."""
    places = part.places()
    missing = -len(places) % _STRIP
    places = functional.pad(places[None], (0, missing), mode="replicate")[0] if missing else places
    return part.raw.data_ptr() + places * part.raw.stride(0)
