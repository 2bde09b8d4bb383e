"""The layers that decoder-only transformers share, each a few kernels on [tokens, width] activations."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from pdserve.engine.model_config import RopeConfig
from pdserve.engine.numerics import LinearKind, Precision

# Packed for some rows, a oneDNN weight serves any number of them equally well; packed for one row it doesn't.
_ONEDNN_PACK_ROWS = 16
_HALF_MAX = 65_504.0

Params = ParamSpec("Params")
Result = TypeVar("Result")


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
        return self._linear(x, self._packed, self._bias, "none", [], "")  # type: ignore[no-any-return]


class HalfLinear:
    """A weight packed as float16, multiplied by float32 activations with float32 sums (FBGEMM)."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._packed = torch.ops.quantized.linear_prepack_fp16(
            weight.float(), None if bias is None else bias.float()
        )
        self._linear = torch.ops.quantized.linear_dynamic_fp16.default

    def __call__(self, x: Tensor) -> Tensor:
        return self._linear(x, self._packed)  # type: ignore[no-any-return]


def make_linear(precision: Precision, weight: Tensor, bias: Tensor | None = None) -> Linear:
    """Pack one weight matrix for its precision.

    weight  [out, in] as stored; rounded to the precision's 16 bits first where it has them, so that every kind of
            linear multiplies by the same numbers
    """
    dtype = torch.float32 if precision.name == "float32" else torch.bfloat16
    weight = weight.to(dtype)
    bias = None if bias is None else bias.to(dtype)
    if precision.linear is LinearKind.FBGEMM_HALF and float(weight.abs().max()) < _HALF_MAX:
        return HalfLinear(weight, bias)
    weight = weight.to(precision.compute)
    bias = None if bias is None else bias.to(precision.compute)
    if precision.linear is LinearKind.ONEDNN:
        return OneDnnLinear(weight, bias)
    return PlainLinear(weight.contiguous(), bias)


class RmsNorm:
    """x / sqrt(mean(x²) + eps) · weight, row by row, the statistics in float32."""

    def __init__(self, weight: Tensor, eps: float, compute: torch.dtype) -> None:
        self._weight = weight.to(compute)
        self._eps = torch.tensor(eps)

    def __call__(self, x: Tensor) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        scale = torch.addcmul(self._eps, norm, norm, value=1 / x.shape[-1]).rsqrt_()
        return (x * scale).to(x.dtype).mul_(self._weight)


class Rotary:
    """Rotary position embedding as one complex multiplication.

    Heads keep the two halves of a rotated pair side by side (`interleave_pairs`), so a head of D numbers is D/2 complex
    ones and position p turns pair i by p·frequency[i]. Queries and keys are permuted alike, so their products are
    those of the half-split form that Hugging Face weights are stored in.
    """

    def __init__(self, config: RopeConfig, head_dim: int) -> None:
        self._frequencies = rope_frequencies(config, head_dim)

    def turns(self, positions: Tensor) -> Tensor:
        """What `rotate_` multiplies by: [tokens, 1, D/2] complex64, for positions [tokens] int64."""
        angles = torch.outer(positions.to(torch.float32), self._frequencies)
        return torch.polar(torch.ones_like(angles), angles).unsqueeze(1)


def rotate_(heads: Tensor, turns: Tensor) -> None:
    """Turn queries and keys in place.

    heads  [tokens, heads · D] float32, pairs side by side; may be a part of wider rows of even length
    turns  what `Rotary.turns` gave
    """
    pairs = heads.view(heads.shape[0], -1, turns.shape[-1], 2)
    torch.view_as_complex(pairs).mul_(turns)


def interleave_pairs(weight: Tensor, num_heads: int) -> Tensor:
    """Reorder rows of a query or key projection (or its bias) from half-split pairs to pairs side by side.

    weight  [num_heads · D, …]
    """
    split = weight.reshape(num_heads, 2, -1, *weight.shape[1:])
    return split.transpose(1, 2).reshape(weight.shape)


def rope_frequencies(config: RopeConfig, head_dim: int) -> Tensor:
    """Radians a position for each of the D/2 pairs, float32.

    Source: https://huggingface.co/docs/transformers, "Utilities for Rotary Embedding".
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    frequencies = 1.0 / (config.base**exponents)
    if config.kind == "linear":
        return frequencies / config.factor
    if config.kind != "llama3":
        return frequencies
    wavelengths = 2 * math.pi / frequencies
    longest = config.original_positions / config.low_freq_factor
    shortest = config.original_positions / config.high_freq_factor
    ramp = (config.original_positions / wavelengths - config.low_freq_factor) / (
        config.high_freq_factor - config.low_freq_factor
    )
    slowed = frequencies / config.factor
    between = (1 - ramp) * slowed + ramp * frequencies
    kept = torch.where(wavelengths < shortest, frequencies, between)
    return torch.where(wavelengths > longest, slowed, kept)


def undivided(function: Callable[Params, Result]) -> Callable[Params, Result]:
    """The same function on one thread.

    torch cuts elementwise work among threads wherever it wants, in the middle of a row too, and computes what is left
    over before a cut by other instructions than the rest, with other last bits where a function is more than one
    rounding. Which elements these are depends on the number of rows.
    """

    @functools.wraps(function)
    def alone(*args: Params.args, **kwargs: Params.kwargs) -> Result:
        num_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return function(*args, **kwargs)
        finally:
            torch.set_num_threads(num_threads)

    return alone


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) · up:  [tokens, 2 · F] → [tokens, F]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)
