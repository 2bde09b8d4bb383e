"""Products with weight matrices by compiled kernels: one packed form for one row and for a whole prompt.

A weight is packed once, into lines that the kernel streams (kernels/linear.c); nothing else is kept of it. What a row
gives depends on that row alone, whoever shares the call and however many threads do.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from pdserve.engine.native.library import Kernels

_BLOCK, _PADDED = 16, 32  # outputs of a line; outputs are padded to whole pairs of blocks


class NativeLinear:
    """x · Wᵀ + b:  [tokens, width] → [tokens, outputs], both in the kernels' activations; see `Linear`."""

    def __init__(self, kernels: Kernels, weight: Tensor, bias: Tensor | None) -> None:
        """weight [outputs, width] bfloat16, width even; bias [outputs]"""
        self._call = kernels.functions.pd_linear
        self.outputs, self.width = weight.shape
        self._packed = kernels.weights.place(pack(weight))
        self._bias = None if bias is None else bias.to(torch.float32).contiguous()
        self._activations = kernels.activations
        self.weight_at = self._packed.data_ptr()
        self.bias_at = None if self._bias is None else self._bias.data_ptr()

    def __call__(self, x: Tensor) -> Tensor:
        if not x.is_contiguous():
            x = x.contiguous()
        assert x.dtype is self._activations and x.shape[1] == self.width, (x.dtype, x.shape, self.width)
        y = torch.empty(len(x), self.outputs, dtype=self._activations)
        self._call(
            x.data_ptr(),
            self.weight_at,
            self.bias_at,
            y.data_ptr(),
            len(x),
            self.outputs,
            self.width,
            torch.get_num_threads(),
        )
        return y


def pack(weight: Tensor) -> Tensor:
    """[outputs, width] bfloat16 → [outputs / 16, width / 2, 16, 2], outputs padded with zeros to a multiple of 32."""
    outputs, width = weight.shape
    missing = -outputs % _PADDED
    padded = functional.pad(weight, (0, 0, 0, missing)) if missing else weight
    return padded.view(-1, _BLOCK, width // 2, 2).permute(0, 2, 1, 3)
