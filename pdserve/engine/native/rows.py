"""Row-by-row functions by compiled kernels: one pass over a row where torch takes five or six."""

from __future__ import annotations

import torch
from torch import Tensor

from pdserve.engine.native.library import Kernels

_WIDTH_UNIT = 16
_KINDS = {"silu": 0, "gelu_tanh": 1}


def fits(width: int) -> bool:
    """Whether the kernels take rows so wide."""
    return width % _WIDTH_UNIT == 0


class NativeNorm:
    """See `RmsNorm`; the result is rounded once, at the end."""

    def __init__(self, kernels: Kernels, weight: Tensor, eps: float, offset: float) -> None:
        """weight [width], stored less the offset"""
        self._call = kernels.functions.pd_norm
        self._activations = kernels.activations
        self._weight = (weight.to(torch.float32) + offset).contiguous()
        self.weight_at = self._weight.data_ptr()
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return self._normed(x.contiguous(), None)

    def after_adding_(self, x: Tensor, more: Tensor) -> Tensor:
        """The norm of x + more, which x becomes."""
        assert x.is_contiguous() and more.is_contiguous() and more.dtype is self._activations
        return self._normed(x, more.data_ptr())

    def _normed(self, x: Tensor, more: int | None) -> Tensor:
        assert x.dtype is self._activations and x.shape[1] == len(self._weight)
        y = torch.empty_like(x)
        num_threads = torch.get_num_threads()
        self._call(x.data_ptr(), more, self.weight_at, y.data_ptr(), *x.shape, self.eps, num_threads)
        return y


class NativeGate:
    """activation(gate) · up:  [tokens, 2 · width] → [tokens, width]; see `swiglu` and `geglu`."""

    def __init__(self, kernels: Kernels, activation: str) -> None:
        self._call = kernels.functions.pd_gate
        self._activations = kernels.activations
        self.kind = _KINDS[activation]

    def __call__(self, gate_up: Tensor) -> Tensor:
        assert gate_up.dtype is self._activations and gate_up.is_contiguous()
        rows, width = gate_up.shape
        y = torch.empty(rows, width // 2, dtype=self._activations)
        self._call(gate_up.data_ptr(), y.data_ptr(), rows, width // 2, self.kind, torch.get_num_threads())
        return y
