"""Quantised weights that stay as they are stored in a device's memory; a product takes them apart as it needs them.

The numbers multiplied by are those of weights that were decoded when they were loaded: rounded to the dtype of the
activations, sums in float32.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from pdserve.engine.row_tiles import RowFunction
from pdserve.engine.stored_matrix import StoredMatrix, StoredRows
from pdserve.errors import Incompatible

# Few rows, each size of tile that a kernel has for more, and those that go through decoded weights.
_TRIED_ROWS = (3, 17, 64, 80)
_TRIED_OUTPUTS = 80
# Kind, width, device, dtype of activations.
Trial = tuple[str, int, str, torch.dtype]
_tried: set[Trial] = set()  # in this process: a model has hundreds of matrices, of a few kinds and widths
# Of the largest result.
_WITHIN = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


class PackedDeviceLinear:
    """x · Wᵀ + b; see `Linear`. By torch, on any device: the reference of `TritonLinear`."""

    def __init__(self, weight: StoredMatrix, bias: Tensor | None) -> None:
        """weight: on the device of x; bias [outputs] in the dtype of x"""
        self._weight = weight
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self._weight.values().to(x.dtype), self._bias)


def packed_linear(
    weight: StoredMatrix, bias: Tensor | None, device: torch.device, compute: torch.dtype
) -> RowFunction:
    """The best one of a device, for activations of this dtype. weight: quantised, wherever it is."""
    there = on_device(weight, device)
    bias = None if bias is None else bias.to(device=device, dtype=compute)
    if device.type != "cuda":
        return PackedDeviceLinear(there, bias)
    # Not everywhere: it comes with torch's builds for GPUs.
    from pdserve.engine.device.triton_linear import TritonLinear

    verify_products(TritonLinear, untried(there, compute, _tried), compute)
    return TritonLinear(there, bias)


def untried(weight: StoredMatrix, compute: torch.dtype, tried: set[Trial]) -> StoredMatrix:
    """Those parts of which no part of the same kind and width has been tried on their device; now they have been."""
    width = weight.shape[1]
    parts: list[StoredRows] = []
    for part in weight.parts:
        trial = (part.kind, width, str(part.raw.device), compute)
        if trial not in tried:
            tried.add(trial)
            parts.append(part)
    return StoredMatrix(parts, width)


def verify_products(
    make: Callable[[StoredMatrix, Tensor | None], RowFunction], weight: StoredMatrix, compute: torch.dtype
) -> None:
    """Multiply a few rows of each part by a kernel and by torch: who computes wrongly here isn't served with.

    Raises Incompatible, with the error as a number.
    """
    for part in weight.parts:
        few = StoredMatrix([StoredRows(part.raw[:_TRIED_OUTPUTS], part.kind)], weight.shape[1])
        generator = torch.Generator(device=part.raw.device).manual_seed(1)
        x = torch.randn(_TRIED_ROWS[-1], few.shape[1], generator=generator, device=part.raw.device)
        x = x.to(compute)
        want = PackedDeviceLinear(few, None)(x).to(torch.float32)
        for rows in _TRIED_ROWS:
            error = float((make(few, None)(x[:rows]).to(torch.float32) - want[:rows]).abs().max())
            if not error <= _WITHIN[compute] * float(want.abs().max()):  # NaN isn't
                raise Incompatible(
                    "a kernel of this device computes wrongly",
                    kernels="product",
                    kind=part.kind,
                    rows=rows,
                    error=error,
                )


def on_device(weight: StoredMatrix, device: torch.device) -> StoredMatrix:
    """The same as it is stored, in a device's memory; neighbours of one kind become one part."""
    parts: list[StoredRows] = []
    for part in weight.parts:
        if parts and parts[-1].kind == part.kind:
            raw = torch.cat((parts.pop().raw, part.gathered().to(device)))
        else:
            raw = part.gathered().to(device)
        parts.append(StoredRows(raw, part.kind))
    return StoredMatrix(parts, weight.shape[1])
