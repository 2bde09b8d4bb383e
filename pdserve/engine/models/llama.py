"""The Llama family: RMSNorm before attention and before a SwiGLU feed-forward, rotary positions, grouped KV heads."""

from __future__ import annotations

import torch
from torch import Tensor

from pdserve.engine.attention import StepAttention
from pdserve.engine.layers import RmsNorm, Rotary, interleave_pairs, make_linear, rotate_, swiglu, undivided
from pdserve.engine.model_config import ModelConfig
from pdserve.engine.models.decoder import StepInputs
from pdserve.engine.numerics import Precision, RowFunction
from pdserve.engine.weights import Weights


class LlamaModel:
    """Source: https://huggingface.co/docs/transformers/model_doc/llama, tensor names included."""

    def __init__(self, config: ModelConfig, weights: Weights, precision: Precision) -> None:
        stored = torch.float32 if precision.name == "float32" else torch.bfloat16
        table_shape = (config.vocab_size, config.hidden_size)
        table = weights.load("model.embed_tokens.weight", table_shape)
        head = table if config.tied_embeddings else weights.load("lm_head.weight", table_shape)
        self._embeddings = table.to(stored)
        self._compute = precision.compute
        self._layers = [_Layer(config, weights, precision, index) for index in range(config.num_layers)]
        norm = weights.load("model.norm.weight", (config.hidden_size,))
        self._norm = RmsNorm(norm, config.norm_eps, precision.compute)
        self._head = make_linear(precision, head)
        self._rotary = Rotary(config.rope, config.head_dim)
        self._width = config.hidden_size
        self._vocab_size = config.vocab_size

    def forward(self, step: StepInputs) -> Tensor:
        x = self._embeddings.index_select(0, step.token_ids).to(self._compute)
        turns = self._rotary.turns(step.positions)
        for layer in self._layers:
            layer.apply_(x, turns, step.attention)
        return x.index_select(0, step.logit_rows)

    def logits(self, hidden: Tensor) -> Tensor:
        if not len(hidden):
            return torch.empty(0, self._vocab_size)
        return self._head(self._norm(hidden)).to(torch.float32)

    def row_functions(self) -> dict[str, tuple[RowFunction, int]]:
        head = {"head": (self._head, self._width), "norm": (self._norm, self._width)}
        return {**self._layers[0].row_functions(self._rotary), **head}


class _Layer:
    """Q, K and V are one matrix, gate and up another: fewer, larger kernels."""

    def __init__(self, config: ModelConfig, weights: Weights, precision: Precision, index: int) -> None:
        self._index = index
        self._rotated_width = (config.num_heads + config.num_kv_heads) * config.head_dim
        self._widths = (config.hidden_size, config.num_heads * config.head_dim, config.ffn_size)
        hidden, queries, ffn = self._widths
        keys = config.num_kv_heads * config.head_dim
        loader = _LayerLoader(weights, f"model.layers.{index}.")

        def projection(name: str, rows: int, columns: int, has_bias: bool) -> tuple[Tensor, Tensor | None]:
            return loader.matrix(name, rows, columns), loader.bias(name, rows) if has_bias else None

        q = _interleaved(
            projection("self_attn.q_proj", queries, hidden, config.attention_bias), config.num_heads
        )
        k = _interleaved(
            projection("self_attn.k_proj", keys, hidden, config.attention_bias), config.num_kv_heads
        )
        v = projection("self_attn.v_proj", keys, hidden, config.attention_bias)
        gate = projection("mlp.gate_proj", ffn, hidden, config.mlp_bias)
        up = projection("mlp.up_proj", ffn, hidden, config.mlp_bias)
        self._qkv = make_linear(precision, *_stacked(q, k, v))
        self._out = make_linear(
            precision, *projection("self_attn.o_proj", hidden, queries, config.attention_bias)
        )
        self._gate_up = make_linear(precision, *_stacked(gate, up))
        self._down = make_linear(precision, *projection("mlp.down_proj", hidden, ffn, config.mlp_bias))
        self._rotate_ = undivided(rotate_) if precision.undivided else rotate_
        self._swiglu = undivided(swiglu) if precision.undivided else swiglu
        self._norm_attention = RmsNorm(
            loader.norm("input_layernorm", hidden), config.norm_eps, precision.compute
        )
        self._norm_ffn = RmsNorm(
            loader.norm("post_attention_layernorm", hidden), config.norm_eps, precision.compute
        )

    def apply_(self, x: Tensor, turns: Tensor, attention: StepAttention) -> None:
        """Add this layer's attention and feed-forward to the residual stream x, [tokens, hidden]."""
        qkv = self._qkv(self._norm_attention(x)).to(torch.float32)
        self._rotate_(qkv[:, : self._rotated_width], turns)
        x.add_(self._out(attention.attend(self._index, qkv).to(x.dtype)))
        x.add_(self._down(self._swiglu(self._gate_up(self._norm_ffn(x)))))

    def row_functions(self, rotary: Rotary) -> dict[str, tuple[RowFunction, int]]:
        hidden, queries, ffn = self._widths

        def rotated(x: Tensor) -> Tensor:
            turned = x.to(torch.float32, copy=True)
            self._rotate_(turned, rotary.turns(torch.full((len(x),), 1000)))
            return turned

        return {
            "qkv": (self._qkv, hidden),
            "rotate": (rotated, self._rotated_width),
            "out": (self._out, queries),
            "gate_up": (self._gate_up, hidden),
            "swiglu": (self._swiglu, 2 * ffn),
            "down": (self._down, ffn),
        }


class _LayerLoader:
    """Tensors of one layer by their short names."""

    def __init__(self, weights: Weights, prefix: str) -> None:
        self._weights = weights
        self._prefix = prefix

    def matrix(self, name: str, rows: int, columns: int) -> Tensor:
        return self._weights.load(f"{self._prefix}{name}.weight", (rows, columns))

    def bias(self, name: str, rows: int) -> Tensor:
        return self._weights.load(f"{self._prefix}{name}.bias", (rows,))

    def norm(self, name: str, size: int) -> Tensor:
        return self._weights.load(f"{self._prefix}{name}.weight", (size,))


def _interleaved(projection: tuple[Tensor, Tensor | None], num_heads: int) -> tuple[Tensor, Tensor | None]:
    weight, bias = projection
    return interleave_pairs(weight, num_heads), None if bias is None else interleave_pairs(bias, num_heads)


def _stacked(*projections: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor | None]:
    """Several projections of one input as one."""
    biases = [bias for _, bias in projections if bias is not None]
    return torch.cat([weight for weight, _ in projections]), torch.cat(biases) if biases else None
