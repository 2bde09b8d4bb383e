"""Products with packed weights by the kernels of `triton_dequant`: how they are launched."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from pdserve.engine.device import triton_dequant
from pdserve.engine.stored_matrix import StoredMatrix, StoredRows
from pdserve.modelstore.grouped_types import UNITS, base_of

# Of more rows, a weight would be taken apart more often than it costs to write it down once.
_MOST_ROWS = 64
_LEAST_TILE = 16  # what tensor cores multiply at least
_OUTPUTS, _PLACES, _DECODED = 64, 64, 1024  # of tiles


class TritonLinear:
    """x · Wᵀ + b; see `Linear`. On a CPU only with TRITON_INTERPRET=1, for tests."""

    def __init__(self, weight: StoredMatrix, bias: Tensor | None) -> None:
        """weight: quantised, on the device of x; bias [outputs] in the dtype of x"""
        self._weight = weight
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        if len(x) > _MOST_ROWS:
            return functional.linear(x, self._decoded(x.dtype), self._bias)
        if x.stride(1) != 1:
            x = x.contiguous()
        y = x.new_empty(len(x), self._weight.shape[0])
        begin = 0
        for part in self._weight.parts:
            end = begin + len(part)
            bias = None if self._bias is None else self._bias[begin:end]
            self._multiply(x, part, bias, y[:, begin:end])
            begin = end
        return y

    def _multiply(self, x: Tensor, part: StoredRows, bias: Tensor | None, y: Tensor) -> None:
        num_rows, width = x.shape
        if not num_rows:
            return
        tile = max(_LEAST_TILE, 1 << (num_rows - 1).bit_length())
        triton_dequant.product[(-(-num_rows // tile), -(-len(part) // _OUTPUTS))](
            x,
            part.raw,
            part.raw if bias is None else bias,
            y,
            num_rows,
            len(part),
            width,
            part.raw.shape[1],
            x.stride(0),
            y.stride(0),
            kind=base_of(part.kind),
            unit=UNITS[part.kind].num_values,
            has_bias=bias is not None,
            M=tile,
            N=_OUTPUTS,
            K=_PLACES,
        )

    def _decoded(self, dtype: torch.dtype) -> Tensor:
        outputs, width = self._weight.shape
        values = torch.empty(outputs, width, dtype=dtype, device=self._weight.parts[0].raw.device)
        begin = 0
        for part in self._weight.parts:
            triton_dequant.decoded[(len(part), -(-width // _DECODED))](
                part.raw,
                values[begin:],
                width,
                part.raw.shape[1],
                kind=base_of(part.kind),
                unit=UNITS[part.kind].num_values,
                K=_DECODED,
            )
            begin += len(part)
        return values
