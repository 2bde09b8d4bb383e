"""The tensors of each family's layers: their names in Hugging Face's and llama.cpp's words, and their shapes.

One table for both kinds of files; without torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pdserve.errors import Incompatible

Shape = tuple[int, ...]


class Sizes:
    """The sizes that shapes are made of. Raises Incompatible where config.json lacks one that is asked for."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config
        self.hidden = self.need("hidden_size")
        self.num_layers = self.need("num_hidden_layers")
        self.num_heads = self.need("num_attention_heads")
        self.num_kv_heads = self.maybe("num_key_value_heads") or self.num_heads
        self.head_dim = self.maybe("head_dim") or self.hidden // self.num_heads
        self.queries = self.num_heads * self.head_dim
        self.keys = self.num_kv_heads * self.head_dim

    @property
    def ffn(self) -> int:
        return self.need("intermediate_size")

    @property
    def num_experts(self) -> int:
        return self.need("num_local_experts", "num_experts")

    def need(self, *keys: str) -> int:
        """The first of these keys that the config has."""
        for key in keys:
            value = self.maybe(key)
            if value is not None:
                return value
        raise Incompatible("config.json lacks a positive whole number", key=" or ".join(keys))

    def maybe(self, key: str) -> int | None:
        value = self._config.get(key)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise Incompatible("config.json needs a positive whole number here", key=key, got=value)
        return value

    def says(self, key: str) -> bool:
        return bool(self._config.get(key, False))

    def is_sparse(self, layer: int) -> bool:
        """Whether this layer of a mixture of experts has them."""
        every = self._config.get("decoder_sparse_step") or 1
        return layer not in (self._config.get("mlp_only_layers") or []) and (layer + 1) % every == 0


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of a layer, or one of each expert: {} in its name is the expert's number.

    gguf       what llama.cpp calls it, behind the layer's number
    bias       the flag of config.json that gives it one; True = it always has one
    transform  what llama.cpp did to it, to be undone: see gguf_tensors.py
    """

    name: str
    gguf: str
    shape: Callable[[Sizes], Shape]
    bias: str | bool = False
    transform: str | None = None

    def has_bias(self, sizes: Sizes) -> bool:
        return sizes.says(self.bias) if isinstance(self.bias, str) else self.bias


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyTensors:
    """What a model of one class stores.

    layer           the tensors of every layer but its feed-forward
    dense, experts  those of a feed-forward without and with experts; some layers may have each where both are named
    norm            transform of every norm
    """

    layer: tuple[Part, ...]
    dense: tuple[Part, ...] = ()
    experts: tuple[Part, ...] = ()
    norm: str | None = None

    def parts(self, sizes: Sizes, layer: int) -> tuple[Part, ...]:
        """The tensors of one layer."""
        has_experts = bool(self.experts) and (not self.dense or sizes.is_sparse(layer))
        return self.layer + (self.experts if has_experts else self.dense)


def _norm(name: str, gguf: str) -> Part:
    return Part(name, gguf, lambda of: (of.hidden,))


def _attention(
    *, bias: str | bool = False, out_bias: str | bool = False, permuted: bool = False
) -> tuple[Part, ...]:
    """permuted: llama.cpp stores Q and K with the rows of each head interleaved."""
    q, k = ("unpermute_q", "unpermute_k") if permuted else (None, None)
    return (
        Part("self_attn.q_proj", "attn_q", lambda of: (of.queries, of.hidden), bias, q),
        Part("self_attn.k_proj", "attn_k", lambda of: (of.keys, of.hidden), bias, k),
        Part("self_attn.v_proj", "attn_v", lambda of: (of.keys, of.hidden), bias),
        Part("self_attn.o_proj", "attn_output", lambda of: (of.hidden, of.queries), out_bias),
    )


def _feed_forward(
    names: tuple[str, str, str] = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
    *,
    width: Callable[[Sizes], int] = lambda of: of.ffn,
    bias: str | bool = False,
) -> tuple[Part, ...]:
    """names: of gate, up and down."""
    gate, up, down = names
    return (
        Part(gate, "ffn_gate", lambda of: (width(of), of.hidden), bias),
        Part(up, "ffn_up", lambda of: (width(of), of.hidden), bias),
        Part(down, "ffn_down", lambda of: (of.hidden, width(of)), bias),
    )


def _router(name: str) -> Part:
    return Part(name, "ffn_gate_inp", lambda of: (of.num_experts, of.hidden))


_NORMS = (_norm("input_layernorm", "attn_norm"), _norm("post_attention_layernorm", "ffn_norm"))
_HEAD_NORMS = (
    Part("self_attn.q_norm", "attn_q_norm", lambda of: (of.head_dim,)),
    Part("self_attn.k_norm", "attn_k_norm", lambda of: (of.head_dim,)),
)
_BY_FLAG = _attention(bias="attention_bias", out_bias="attention_bias")
_GEMMA3 = FamilyTensors(
    layer=(
        _norm("input_layernorm", "attn_norm"),
        _norm("post_attention_layernorm", "post_attention_norm"),
        _norm("pre_feedforward_layernorm", "ffn_norm"),
        _norm("post_feedforward_layernorm", "post_ffw_norm"),
        *_BY_FLAG,
        *_HEAD_NORMS,
    ),
    dense=_feed_forward(),
    norm="minus_one",
)

FAMILIES: dict[str, FamilyTensors] = {
    "LlamaForCausalLM": FamilyTensors(
        layer=_NORMS + _attention(bias="attention_bias", out_bias="attention_bias", permuted=True),
        dense=_feed_forward(bias="mlp_bias"),
    ),
    "MistralForCausalLM": FamilyTensors(layer=_NORMS + _attention(permuted=True), dense=_feed_forward()),
    "MixtralForCausalLM": FamilyTensors(
        layer=_NORMS + _attention(permuted=True),
        experts=(
            _router("block_sparse_moe.gate"),
            *_feed_forward(
                (
                    "block_sparse_moe.experts.{}.w1",
                    "block_sparse_moe.experts.{}.w3",
                    "block_sparse_moe.experts.{}.w2",
                )
            ),
        ),
    ),
    "Qwen2ForCausalLM": FamilyTensors(layer=_NORMS + _attention(bias=True), dense=_feed_forward()),
    "Qwen3ForCausalLM": FamilyTensors(layer=_NORMS + _BY_FLAG + _HEAD_NORMS, dense=_feed_forward()),
    "Qwen3MoeForCausalLM": FamilyTensors(
        layer=_NORMS + _BY_FLAG + _HEAD_NORMS,
        dense=_feed_forward(),
        experts=(
            _router("mlp.gate"),
            *_feed_forward(
                ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj", "mlp.experts.{}.down_proj"),
                width=lambda of: of.need("moe_intermediate_size"),
            ),
        ),
    ),
    "Phi3ForCausalLM": FamilyTensors(
        layer=(
            *_NORMS,
            Part("self_attn.qkv_proj", "attn_qkv", lambda of: (of.queries + 2 * of.keys, of.hidden)),
            Part("self_attn.o_proj", "attn_output", lambda of: (of.hidden, of.queries)),
        ),
        dense=(
            Part("mlp.gate_up_proj", "ffn_up", lambda of: (2 * of.ffn, of.hidden)),
            Part("mlp.down_proj", "ffn_down", lambda of: (of.hidden, of.ffn)),
        ),
    ),
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3ForConditionalGeneration": _GEMMA3,
}
