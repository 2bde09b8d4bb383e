"""The attention half of a layer: one projection to queries, keys and values, turns, attention, one projection back."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from pdserve.engine.attention import StepAttention
from pdserve.engine.layers import HeadNorm, make_linear, undivided
from pdserve.engine.model_config import ModelConfig
from pdserve.engine.models.tensors import LayerTensors, Projection, stacked
from pdserve.engine.numerics import Precision, RowFunction
from pdserve.engine.rotary import Rotary, interleave_pairs, rotate_


class Qkv(NamedTuple):
    """Projections as they are stored, pairs of a head half-split."""

    queries: Projection
    keys: Projection
    values: Projection


class LoadQkv(Protocol):
    """Raises BadModel if a tensor is missing or has another shape."""

    def __call__(self, config: ModelConfig, tensors: LayerTensors) -> Qkv: ...


def separate_qkv(config: ModelConfig, tensors: LayerTensors) -> Qkv:
    """q_proj, k_proj and v_proj."""
    hidden, size, has_bias = config.hidden_size, config.head_dim, config.qkv_bias
    return Qkv(
        tensors.projection("self_attn.q_proj", config.num_heads * size, hidden, has_bias),
        tensors.projection("self_attn.k_proj", config.num_kv_heads * size, hidden, has_bias),
        tensors.projection("self_attn.v_proj", config.num_kv_heads * size, hidden, has_bias),
    )


class SelfAttention:
    """Attention of one layer."""

    def __init__(self, config: ModelConfig, qkv: Qkv, tensors: LayerTensors, precision: Precision) -> None:
        queries, hidden = config.num_heads * config.head_dim, config.hidden_size
        self._index = tensors.index
        self._hidden = hidden
        self._query_width = queries
        self._rotated_width = queries + config.num_kv_heads * config.head_dim
        q = _interleaved(qkv.queries, config.num_heads, config.rotary_dim)
        k = _interleaved(qkv.keys, config.num_kv_heads, config.rotary_dim)
        self._qkv = make_linear(precision, *stacked(q, k, qkv.values))
        out = tensors.projection("self_attn.o_proj", hidden, queries, config.output_bias)
        self._out = make_linear(precision, *out)
        self._rotate_ = undivided(rotate_) if precision.undivided else rotate_
        self._normalise_ = None
        if config.has_qk_norm:
            norm = _head_norm(config, tensors)
            self._normalise_ = undivided(norm.apply_) if precision.undivided else norm.apply_

    def __call__(self, x: Tensor, turns: Tensor, attention: StepAttention) -> Tensor:
        """[tokens, hidden] → [tokens, hidden], in the dtype of the activations."""
        qkv = self._qkv(x).to(torch.float32)
        rotated = qkv[:, : self._rotated_width]
        if self._normalise_ is not None:
            self._normalise_(rotated)
        self._rotate_(rotated, turns)
        return self._out(attention.attend(self._index, qkv).to(x.dtype))

    def row_functions(self, rotary: Rotary) -> dict[str, tuple[RowFunction, int]]:
        """As `Decoder.row_functions`."""

        def rotated(x: Tensor) -> Tensor:
            turned = x.to(torch.float32, copy=True)
            if self._normalise_ is not None:
                self._normalise_(turned)
            self._rotate_(turned, rotary.turns(torch.full((len(x),), 1000)))
            return turned

        return {
            "qkv": (self._qkv, self._hidden),
            "rotate": (rotated, self._rotated_width),
            "out": (self._out, self._query_width),
        }


def _head_norm(config: ModelConfig, tensors: LayerTensors) -> HeadNorm:
    """The norms of queries and keys, their weights in the order in which the heads' pairs lie."""

    def weights(name: str, num_heads: int) -> Tensor:
        stored = tensors.norm(f"self_attn.{name}", config.head_dim)
        weight = interleave_pairs(stored, 1, config.rotary_dim).to(torch.float32) + config.norm_offset
        return weight.expand(num_heads, -1)

    return HeadNorm(
        weights("q_norm", config.num_heads), weights("k_norm", config.num_kv_heads), config.norm_eps
    )


def _interleaved(projection: Projection, num_heads: int, rotary_dim: int) -> Projection:
    weight, bias = projection
    return Projection(
        interleave_pairs(weight, num_heads, rotary_dim),
        None if bias is None else interleave_pairs(bias, num_heads, rotary_dim),
    )
