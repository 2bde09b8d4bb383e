"""The layers that decoder-only transformers share, each a few kernels on [tokens, width] activations."""

from __future__ import annotations

import warnings
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from pdserve.engine.device.packed_linear import packed_linear
from pdserve.engine.kernel_caches import rounded_rows
from pdserve.engine.native.blocks import as_multiplied
from pdserve.engine.native.library import Kernels
from pdserve.engine.native.linear import NativeLinear
from pdserve.engine.native.packed import PackedLinear
from pdserve.engine.numerics import LinearKind, Precision
from pdserve.engine.row_tiles import RowSubject, RowTiles
from pdserve.engine.stored_matrix import StoredMatrix

# Packed for some rows, a oneDNN weight serves any number of them equally well; packed for one row it doesn't.
_ONEDNN_PACK_ROWS = 16
_HALF_MAX = 65_504.0
_ALIGNMENT = 64  # bytes
_PROVEN_OUTPUTS = 4096


class Linear(Protocol):
    """x · Wᵀ + b:  [tokens, in] → [tokens, out], in the dtype of the activations."""

    def __call__(self, x: Tensor) -> Tensor: ...


class PlainLinear:
    """torch's own kernel."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self._weight, self._bias)


class OneDnnLinear:
    """A weight packed once for oneDNN: up to 4 times the speed of the plain kernel for a few rows."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, _ONEDNN_PACK_ROWS)
        self._bias = bias
        self._linear = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: Tensor) -> Tensor:
        num_rows = x.shape[0]
        num_missing = rounded_rows(num_rows) - num_rows
        if not num_missing:  # a slice takes microseconds, in a step of a hundred products
            return self._linear(x, self._packed, self._bias, "none", [], "")  # type: ignore[no-any-return]
        x = functional.pad(x, (0, 0, 0, num_missing))
        return self._linear(x, self._packed, self._bias, "none", [], "")[:num_rows]  # type: ignore[no-any-return]


class HalfLinear:
    """A weight packed as float16, multiplied by float32 activations with float32 sums (FBGEMM)."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        packed = torch.ops.quantized.linear_prepack_fp16(
            weight.float(), None if bias is None else bias.float()
        )
        with warnings.catch_warnings():  # of TorchScript's end, which nothing else does the work of here
            warnings.simplefilter("ignore", DeprecationWarning)
            self._linear = torch.jit.script(_HalfProduct(packed)).forward

    def __call__(self, x: Tensor) -> Tensor:
        return self._linear(x)  # type: ignore[no-any-return]


class _HalfProduct(torch.nn.Module):
    """As TorchScript, since a packed weight is no tensor: to hand it over from Python with each call takes 10 µs, a
    tenth of what one token's product takes (docs/decisions/0001-bf16-without-instructions.md).
    """

    def __init__(self, packed: torch.ScriptObject) -> None:
        super().__init__()
        self.packed = packed

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.quantized.linear_dynamic_fp16(x, self.packed)  # type: ignore[no-any-return]


def make_linear(precision: Precision, weight: StoredMatrix, bias: Tensor | None = None) -> Linear:
    """Pack one weight matrix for its precision; on a device, and by compiled kernels, quantised ones stay as stored.

    weight  [out, in] as stored; rounded to the precision's 16 bits first where it has them, so that every kind of
            linear multiplies by the same numbers
    """
    if precision.device is not None and weight.is_quantised:
        return packed_linear(weight, bias, precision.device, precision.compute)
    if precision.kernels is not None:
        if weight.is_quantised:
            weight = as_multiplied(weight) or StoredMatrix.plain(weight.values())
        if precision.tiles is not None:
            _to_be_proven(precision.tiles, precision.kernels, weight, bias)
        return _native(precision.kernels, weight, bias)
    linear = _pack(precision, weight.values(), bias)
    if precision.product_tiles is None:
        return linear
    num_outputs, width = weight.shape
    name = f"{type(linear).__name__} from {width} to {num_outputs}{' with bias' if bias is not None else ''}"
    return precision.product_tiles.each(RowSubject(name, linear, width, is_product=True))


def _native(kernels: Kernels, weight: StoredMatrix, bias: Tensor | None) -> NativeLinear | PackedLinear:
    if weight.is_quantised:
        return PackedLinear(kernels, weight, bias)
    bias = None if bias is None else bias.to(torch.bfloat16)
    return NativeLinear(kernels, weight.values().to(torch.bfloat16), bias)


def _to_be_proven(tiles: RowTiles, kernels: Kernels, weight: StoredMatrix, bias: Tensor | None) -> None:
    """Such a product's rows; of many outputs the first, since each output has sums of its own."""
    num_outputs, width = weight.shape
    kinds = "-".join(sorted({part.kind for part in weight.parts})) if weight.is_quantised else "BF16"
    name = f"{kinds} product from {width} to {num_outputs}{' with bias' if bias is not None else ''}"
    if name not in tiles.uncut:
        some = min(num_outputs, _PROVEN_OUTPUTS)
        linear = _native(kernels, weight.rows(0, some), None if bias is None else bias[:some])
        tiles.leave_uncut(RowSubject(name, linear, width, is_product=True))


def _pack(precision: Precision, weight: Tensor, bias: Tensor | None) -> Linear:
    dtype = torch.float32 if precision.name == "float32" else torch.bfloat16
    weight = weight.to(dtype)
    bias = None if bias is None else bias.to(dtype)
    # Of a large matrix there are never three at a time.
    weight = weight.to(device=precision.device, dtype=precision.compute)
    if precision.linear is LinearKind.FBGEMM_HALF and _fits_half(weight):
        return HalfLinear(weight, bias)
    bias = None if bias is None else bias.to(device=precision.device, dtype=precision.compute)
    if precision.linear is LinearKind.ONEDNN:
        return OneDnnLinear(weight, bias)
    # Bits may depend on where a matrix lies, and a view of the file lies wherever the file has it.
    is_moved = precision.tiles is not None and weight.data_ptr() % _ALIGNMENT != 0
    return PlainLinear(weight.clone() if is_moved else weight.contiguous(), bias)


def _fits_half(weight: Tensor) -> bool:
    lowest, highest = torch.aminmax(weight)  # abs() would be another copy of it
    return float(lowest) > -_HALF_MAX and float(highest) < _HALF_MAX


class RmsNorm:
    """x / sqrt(mean(x²) + eps) · weight, row by row, the statistics in float32."""

    def __init__(self, weight: Tensor, eps: float, compute: torch.dtype, offset: float = 0.0) -> None:
        """offset: added to the weights; then they multiply before the result is rounded to `compute`, as Gemma does."""
        self._weight = weight.to(torch.float32) + offset if offset else weight.to(compute)
        self._is_rounded_last = bool(offset)
        self._eps = torch.tensor(eps, device=weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        scale = torch.addcmul(self._eps, norm, norm, value=1 / x.shape[-1]).rsqrt_()
        if self._is_rounded_last:
            return (x * scale).mul_(self._weight).to(x.dtype)
        return (x * scale).to(x.dtype).mul_(self._weight)


class HeadNorm:
    """An RMSNorm of each query and key head, in place, in float32."""

    def __init__(self, queries: Tensor, keys: Tensor, eps: float) -> None:
        """queries [heads, D], keys [kv_heads, D]: the weights of each head."""
        #: [heads + kv_heads, D] float32
        self.weight = torch.cat((queries, keys)).to(torch.float32)
        self.eps = eps
        self._eps = torch.tensor(eps, device=self.weight.device)

    def apply_(self, heads: Tensor) -> None:
        """heads  [tokens, (heads + kv_heads) · D] float32; may be a part of wider rows"""
        rows = heads.view(len(heads), *self.weight.shape)
        norm = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
        scale = torch.addcmul(self._eps, norm, norm, value=1 / rows.shape[-1]).rsqrt_()
        rows.mul_(scale).mul_(self.weight)


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) · up:  [tokens, 2 · F] → [tokens, F]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)


def geglu(gate_up: Tensor) -> Tensor:
    """gelu(gate) · up with the tanh form of gelu:  [tokens, 2 · F] → [tokens, F]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.gelu(gate, approximate="tanh").mul_(up)


def soft_cap_(x: Tensor, cap: float) -> Tensor:
    """cap · tanh(x / cap), in place."""
    return x.div_(cap).tanh_().mul_(cap)
