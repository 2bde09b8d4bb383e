"""The attention half of a layer: one projection to queries, keys and values, turns, attention, one projection back."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from pdserve.engine.attention import StepAttention, Turn
from pdserve.engine.layers import HeadNorm, make_linear
from pdserve.engine.model_config import ModelConfig
from pdserve.engine.models.tensors import LayerTensors, Projection, stacked
from pdserve.engine.native.program import Program, Slot
from pdserve.engine.numerics import Precision
from pdserve.engine.parallel.shard import Shard
from pdserve.engine.rotary import Rotary, drawn_positions, interleave_pairs, rotate_


class Qkv(NamedTuple):
    """Projections as they are stored, pairs of a head half-split."""

    queries: Projection
    keys: Projection
    values: Projection

    def part(self, config: ModelConfig, shard: Shard) -> Qkv:
        """Of the heads of one rank; config: the whole model's."""
        heads = shard.part(config.num_heads)
        kv_heads = shard.kv_part(config.num_kv_heads).range(config.num_kv_heads)
        size = config.head_dim
        queries, keys = (slice(part.start * size, part.stop * size) for part in (heads, kv_heads))
        return Qkv(self.queries.outputs(queries), self.keys.outputs(keys), self.values.outputs(keys))


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
    """Attention of one layer, or a rank's heads of it: then the results of all ranks add up to the layer's."""

    def __init__(
        self, config: ModelConfig, load_qkv: LoadQkv, tensors: LayerTensors, precision: Precision
    ) -> None:
        """config: the whole model's."""
        shard, whole = tensors.shard, config.num_heads * config.head_dim
        qkv = load_qkv(config, tensors).part(config, shard)
        out = tensors.projection("self_attn.o_proj", config.hidden_size, whole, config.output_bias)
        config = shard.config(config)
        queries = config.num_heads * config.head_dim
        self._index = tensors.index
        self._query_width = queries
        self._rotated_width = queries + config.num_kv_heads * config.head_dim
        q = _interleaved(qkv.queries, config.num_heads, config.rotary_dim)
        k = _interleaved(qkv.keys, config.num_kv_heads, config.rotary_dim)
        projection = stacked(q, k, qkv.values)
        self._qkv = make_linear(precision, *projection)
        self._out = make_linear(precision, *out.inputs(shard.part(whole), adds_bias=shard.rank == 0))
        self._norm = _head_norm(config, tensors, precision.device) if config.has_qk_norm else None
        rotary = Rotary(config.rope, config.head_dim, config.rotary_dim, precision.device)
        self._turned = precision.rowwise(
            "turn",
            self._turn,
            len(projection.weight),
            lambda rows: (rows.clone(), rotary.turns(drawn_positions(rows))),
        )

    def __call__(self, x: Tensor, turns: Tensor, attention: StepAttention) -> Tensor:
        """[tokens, hidden] → [tokens, hidden], in the dtype of the activations."""
        turn = Turn(self._turned, turns, self._norm)
        return self._out(attention.attend(self._index, self._qkv(x), turn).to(x.dtype))

    def compile(self, program: Program, x: Slot, rope: int) -> Slot:
        """The same as operations; rope: which of the step's turns. Raises NotCompiled."""
        projected = program.product(self._qkv, x, "projected")
        norm = None if self._norm is None else (self._norm.weight, self._norm.eps)
        attended = program.attend(self._index, projected, "attended", self._query_width, rope, norm)
        return program.product(self._out, attended, "out")

    def _turn(self, projected: Tensor, turns: Tensor) -> Tensor:
        """As float32, queries and keys normalised where the family does that, and turned. May overwrite `projected`."""
        qkv = projected.to(torch.float32)
        heads = qkv[:, : self._rotated_width]
        if self._norm is not None:
            self._norm.apply_(heads)
        rotate_(heads, turns)
        return qkv


def _head_norm(config: ModelConfig, tensors: LayerTensors, device: torch.device | None) -> HeadNorm:
    """The norms of queries and keys, their weights in the order in which the heads' pairs lie."""

    def weights(name: str, num_heads: int) -> Tensor:
        stored = tensors.norm(f"self_attn.{name}", config.head_dim).to(device=device)
        weight = interleave_pairs(stored, 1, config.rotary_dim).to(torch.float32) + config.norm_offset
        return weight.expand(num_heads, -1)

    return HeadNorm(
        weights("q_norm", config.num_heads), weights("k_norm", config.num_kv_heads), config.norm_eps
    )


def _interleaved(projection: Projection, num_heads: int, rotary_dim: int) -> Projection:
    weight, bias = projection
    return Projection(
        weight.reordered(lambda rows: interleave_pairs(rows, num_heads, rotary_dim)),
        None if bias is None else interleave_pairs(bias, num_heads, rotary_dim),
    )
