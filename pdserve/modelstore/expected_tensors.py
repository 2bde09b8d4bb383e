"""Which tensors a model of each class must have, and of which shapes, by its config.json alone.

The engine finds the same out while it loads; this tells it in a millisecond, without torch and before anything starts.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any

from pdserve.errors import Incompatible

Shape = tuple[int, ...]
HEAD = "lm_head.weight"
_Named = Iterator[tuple[str, Shape]]


def check_tensors(config: Mapping[str, Any], shapes: Mapping[str, Shape], where: str) -> None:
    """Raise Incompatible for the first tensor that is missing or has another shape than the config says.

    shapes  of all stored tensors, by name; more than are needed is fine
    where   file or folder, for the message
    A class that isn't known here is not checked.
    """
    architecture = str((config.get("architectures") or ["?"])[0])
    layer_tensors = _LAYERS.get(architecture)
    if layer_tensors is None:
        return
    for name, shape in _all_tensors(_Sizes(config), layer_tensors, has_head=has_own_head(config, shapes)):
        if name not in shapes:
            raise Incompatible("the model lacks a tensor", tensor=name, file=where)
        if shapes[name] != shape:
            raise Incompatible(
                "a tensor's shape is not what the config says",
                tensor=name,
                file=where,
                want=shape,
                got=shapes[name],
            )


def is_tied(config: Mapping[str, Any]) -> bool:
    """Whether the output projection is the embedding; configs leave it out where it is what their class does anyway."""
    said = config.get("tie_word_embeddings")
    named = config.get("architectures") or []
    return bool(said) if said is not None else any(str(name).startswith("Gemma3For") for name in named)


class _Sizes:
    """The sizes that shapes are made of. Raises Incompatible where config.json lacks one."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config
        self.hidden = self.need("hidden_size")
        self.num_layers = self.need("num_hidden_layers")
        self.num_heads = self.need("num_attention_heads")
        self.num_kv_heads = self.maybe("num_key_value_heads") or self.num_heads
        self.head_dim = self.maybe("head_dim") or self.hidden // self.num_heads
        self.queries = self.num_heads * self.head_dim
        self.keys = self.num_kv_heads * self.head_dim

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

    def get(self, key: str, default: Any) -> Any:
        value = self._config.get(key)
        return default if value is None else value


def has_own_head(config: Mapping[str, Any], tensor_names: Container[str]) -> bool:
    """Whether logits are made with a matrix of their own, not the embeddings.

    One that is stored counts whatever the config says, as in transformers 5: its numbers may be others.
    """
    return HEAD in tensor_names or not is_tied(config)


def _all_tensors(sizes: _Sizes, layer_tensors: Callable[[_Sizes, int], _Named], *, has_head: bool) -> _Named:
    vocabulary = (sizes.need("vocab_size"), sizes.hidden)
    yield "model.embed_tokens.weight", vocabulary
    for layer in range(sizes.num_layers):
        for name, shape in layer_tensors(sizes, layer):
            yield f"model.layers.{layer}.{name}", shape
    yield "model.norm.weight", (sizes.hidden,)
    if has_head:
        yield HEAD, vocabulary


def _llama(sizes: _Sizes, layer: int) -> _Named:
    yield from _norms(sizes, "input_layernorm", "post_attention_layernorm")
    with_bias = sizes.says("attention_bias")
    yield from _attention(sizes, qkv_bias=with_bias, output_bias=with_bias)
    yield from _ffn("mlp", sizes.hidden, sizes.need("intermediate_size"), bias=sizes.says("mlp_bias"))


def _mistral(sizes: _Sizes, layer: int) -> _Named:
    yield from _norms(sizes, "input_layernorm", "post_attention_layernorm")
    yield from _attention(sizes)
    yield from _ffn("mlp", sizes.hidden, sizes.need("intermediate_size"))


def _mixtral(sizes: _Sizes, layer: int) -> _Named:
    yield from _norms(sizes, "input_layernorm", "post_attention_layernorm")
    yield from _attention(sizes)
    num_experts, ffn = sizes.need("num_local_experts", "num_experts"), sizes.need("intermediate_size")
    yield "block_sparse_moe.gate.weight", (num_experts, sizes.hidden)
    for expert in range(num_experts):
        yield f"block_sparse_moe.experts.{expert}.w1.weight", (ffn, sizes.hidden)
        yield f"block_sparse_moe.experts.{expert}.w2.weight", (sizes.hidden, ffn)
        yield f"block_sparse_moe.experts.{expert}.w3.weight", (ffn, sizes.hidden)


def _qwen2(sizes: _Sizes, layer: int) -> _Named:
    yield from _norms(sizes, "input_layernorm", "post_attention_layernorm")
    yield from _attention(sizes, qkv_bias=True)
    yield from _ffn("mlp", sizes.hidden, sizes.need("intermediate_size"))


def _qwen3(sizes: _Sizes, layer: int) -> _Named:
    yield from _qwen3_attention(sizes)
    yield from _ffn("mlp", sizes.hidden, sizes.need("intermediate_size"))


def _qwen3_moe(sizes: _Sizes, layer: int) -> _Named:
    yield from _qwen3_attention(sizes)
    is_sparse = (layer + 1) % sizes.get("decoder_sparse_step", 1) == 0
    if layer in sizes.get("mlp_only_layers", []) or not is_sparse:
        yield from _ffn("mlp", sizes.hidden, sizes.need("intermediate_size"))
        return
    num_experts = sizes.need("num_experts", "num_local_experts")
    yield "mlp.gate.weight", (num_experts, sizes.hidden)
    for expert in range(num_experts):
        yield from _ffn(f"mlp.experts.{expert}", sizes.hidden, sizes.need("moe_intermediate_size"))


def _phi3(sizes: _Sizes, layer: int) -> _Named:
    yield from _norms(sizes, "input_layernorm", "post_attention_layernorm")
    ffn = sizes.need("intermediate_size")
    yield "self_attn.qkv_proj.weight", (sizes.queries + 2 * sizes.keys, sizes.hidden)
    yield "self_attn.o_proj.weight", (sizes.hidden, sizes.queries)
    yield "mlp.gate_up_proj.weight", (2 * ffn, sizes.hidden)
    yield "mlp.down_proj.weight", (sizes.hidden, ffn)


def _gemma3(sizes: _Sizes, layer: int) -> _Named:
    yield from _norms(
        sizes,
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    )
    with_bias = sizes.says("attention_bias")
    yield from _attention(sizes, qkv_bias=with_bias, output_bias=with_bias)
    yield from _qk_norms(sizes)
    yield from _ffn("mlp", sizes.hidden, sizes.need("intermediate_size"))


_LAYERS: dict[str, Callable[[_Sizes, int], _Named]] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "MixtralForCausalLM": _mixtral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "Qwen3MoeForCausalLM": _qwen3_moe,
    "Phi3ForCausalLM": _phi3,
    "Gemma3ForCausalLM": _gemma3,
    "Gemma3ForConditionalGeneration": _gemma3,
}


def _norms(sizes: _Sizes, *names: str) -> _Named:
    for name in names:
        yield f"{name}.weight", (sizes.hidden,)


def _qk_norms(sizes: _Sizes) -> _Named:
    yield "self_attn.q_norm.weight", (sizes.head_dim,)
    yield "self_attn.k_norm.weight", (sizes.head_dim,)


def _qwen3_attention(sizes: _Sizes) -> _Named:
    yield from _norms(sizes, "input_layernorm", "post_attention_layernorm")
    with_bias = sizes.says("attention_bias")
    yield from _attention(sizes, qkv_bias=with_bias, output_bias=with_bias)
    yield from _qk_norms(sizes)


def _attention(sizes: _Sizes, *, qkv_bias: bool = False, output_bias: bool = False) -> _Named:
    for name, rows in (("q_proj", sizes.queries), ("k_proj", sizes.keys), ("v_proj", sizes.keys)):
        yield f"self_attn.{name}.weight", (rows, sizes.hidden)
        if qkv_bias:
            yield f"self_attn.{name}.bias", (rows,)
    yield "self_attn.o_proj.weight", (sizes.hidden, sizes.queries)
    if output_bias:
        yield "self_attn.o_proj.bias", (sizes.hidden,)


def _ffn(prefix: str, hidden: int, ffn: int, *, bias: bool = False) -> _Named:
    for name, rows, columns in (
        ("gate_proj", ffn, hidden),
        ("up_proj", ffn, hidden),
        ("down_proj", hidden, ffn),
    ):
        yield f"{prefix}.{name}.weight", (rows, columns)
        if bias:
            yield f"{prefix}.{name}.bias", (rows,)
