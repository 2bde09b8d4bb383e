"""`config.json` and `generation_config.json` from GGUF metadata, in Hugging Face's words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pdserve.decimals import shortest
from pdserve.errors import Incompatible
from pdserve.modelstore.gguf_file import GgufFile
from pdserve.modelstore.gguf_rope import rope_scaling
from pdserve.modelstore.gguf_types import CONTROL

# Tokens that end a turn in common chat templates; one that the file's own template uses ends generation too.
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>", "<|eom_id|>")
# Gemma 3 scales queries by its head size, but for the 27B model, which only its number of layers tells apart.
_GEMMA3_27B_LAYERS = 62
_GEMMA3_LOCAL_THETA = 10_000.0
_GEMMA3_PATTERN = 6


def model_config(file: GgufFile) -> dict[str, Any]:
    """The config of a GGUF file. Raises Incompatible for architectures that can't be imported."""
    architecture = file.architecture()
    make = _MAKERS.get(architecture)
    if make is None:
        raise Incompatible(
            "GGUF architecture is not supported", got=architecture, supported=", ".join(_MAKERS)
        )
    num_parts = file.typed("split.count", int, 1)
    if num_parts > 1:
        raise Incompatible(
            "GGUF file is one part of several: join them with `llama-gguf-split --merge`",
            file=file.path.name,
            parts=num_parts,
        )
    return make(file)


def generation_config(file: GgufFile) -> dict[str, Any]:
    """Which ids begin and end a text: the file's own, and the end of a chat turn as its template writes it."""
    tokens = file.tokens()
    types = file.listed("tokenizer.ggml.token_type", int, [])
    template = file.typed("tokenizer.chat_template", str, "")
    named = [file.token_id(name) for name in ("eos", "eot", "eom")]
    ends = dict.fromkeys([*(token_id for token_id in named if token_id is not None), *file.token_ids("eos")])
    for turn_end in _TURN_ENDS:
        if turn_end in template and turn_end in tokens:
            token_id = tokens.index(turn_end)
            if token_id < len(types) and types[token_id] == CONTROL:
                ends[token_id] = None
    config: dict[str, Any] = {"eos_token_id": list(ends)}
    for name, key in (("bos", "bos_token_id"), ("padding", "pad_token_id")):
        named_id = file.token_id(name)
        if named_id is not None:
            config[key] = named_id
    return config


def _llama(file: GgufFile) -> dict[str, Any]:
    """Llama; Mistral and Mixtral, which llama.cpp writes under the same name."""
    if file.typed(file.key("expert_count"), int, 0):
        config = _common(file, "MixtralForCausalLM", "mixtral")
        config.update(
            num_local_experts=_whole(file, "expert_count"),
            num_experts_per_tok=_whole(file, "expert_used_count"),
        )
        return config
    window = file.typed(file.key("attention.sliding_window"), int, 0)
    if window:
        return {**_common(file, "MistralForCausalLM", "mistral"), "sliding_window": window}
    config = _common(file, "LlamaForCausalLM", "llama")
    config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    config["mlp_bias"] = "blk.0.ffn_up.bias" in file.tensors
    return config


def _qwen2(file: GgufFile) -> dict[str, Any]:
    return {**_common(file, "Qwen2ForCausalLM", "qwen2"), "use_sliding_window": False}


def _qwen3(file: GgufFile) -> dict[str, Any]:
    config = {**_common(file, "Qwen3ForCausalLM", "qwen3"), "use_sliding_window": False}
    config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    return config


def _qwen3_moe(file: GgufFile) -> dict[str, Any]:
    config = {**_common(file, "Qwen3MoeForCausalLM", "qwen3_moe"), "use_sliding_window": False}
    config.update(
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        num_experts=_whole(file, "expert_count"),
        num_experts_per_tok=_whole(file, "expert_used_count"),
        moe_intermediate_size=_whole(file, "expert_feed_forward_length"),
        # llama.cpp knows this architecture with these values only
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    )
    return config


def _phi3(file: GgufFile) -> dict[str, Any]:
    config = _common(file, "Phi3ForCausalLM", "phi3", partial_rotary=True)
    context = config["max_position_embeddings"]
    window = file.typed(file.key("attention.sliding_window"), int, 0)
    config["sliding_window"] = window if 0 < window < context else None
    config.setdefault("pad_token_id", None)  # else transformers takes Phi-3-mini's
    config["original_max_position_embeddings"] = _whole(file, "rope.scaling.original_context_length", context)
    return config


def _gemma3(file: GgufFile) -> dict[str, Any]:
    config = _common(file, "Gemma3ForCausalLM", "gemma3_text")
    num_layers, head_dim = config["num_hidden_layers"], config["head_dim"]
    pattern = _whole(file, "attention.sliding_window_pattern", _GEMMA3_PATTERN)
    is_27b = num_layers == _GEMMA3_27B_LAYERS
    del config["hidden_act"]
    config.update(
        hidden_activation="gelu_pytorch_tanh",
        query_pre_attn_scalar=config["hidden_size"] // config["num_attention_heads"] if is_27b else head_dim,
        attention_bias=False,
        # the base of the sliding layers; rope_theta and rope_scaling are those of the full ones
        rope_local_base_freq=_real(file, "rope.freq_base_swa", _GEMMA3_LOCAL_THETA),
        sliding_window=_whole(file, "attention.sliding_window"),
        sliding_window_pattern=pattern,
        layer_types=[
            "sliding_attention" if (layer + 1) % pattern else "full_attention" for layer in range(num_layers)
        ],
    )
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        config[name] = _real(file, name, 0.0) or None
    return config


_MAKERS: dict[str, Callable[[GgufFile], dict[str, Any]]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3_moe,
    "phi3": _phi3,
    "gemma3": _gemma3,
}


def _common(
    file: GgufFile, architecture: str, model_type: str, *, partial_rotary: bool = False
) -> dict[str, Any]:
    """What every family's config has."""
    hidden_size, num_heads = _whole(file, "embedding_length"), _whole(file, "attention.head_count")
    head_dim = _whole(file, "attention.key_length", hidden_size // num_heads)
    if _whole(file, "attention.value_length", head_dim) != head_dim:
        raise Incompatible("GGUF keys and values of different sizes are not supported", key_length=head_dim)
    rotary = _whole(file, "rope.dimension_count", head_dim)
    if rotary != head_dim and not partial_rotary:
        raise Incompatible("GGUF partial rotary embedding is not supported", rotary=rotary, head_dim=head_dim)
    rope_theta = _real(file, "rope.freq_base", 10_000.0)
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_size": hidden_size,
        "intermediate_size": _whole(file, "feed_forward_length"),
        "num_hidden_layers": _whole(file, "block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": _whole(file, "attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": _whole(file, "context_length"),
        "rms_norm_eps": _real(file, "attention.layer_norm_rms_epsilon"),
        "rope_theta": rope_theta,
        "rope_scaling": rope_scaling(file, head_dim, rope_theta),
        "vocab_size": _vocab_size(file),
        # The output projection is written only where it isn't the embedding.
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }
    if rotary != head_dim:
        config["partial_rotary_factor"] = rotary / head_dim
    config.update(generation_config(file))
    return config


def _whole(file: GgufFile, key: str, default: int | None = None) -> int:
    """A positive whole number of the architecture; a list counts if all its values, one a layer, are equal."""
    value: Any = file.typed(file.key(key), object, default)
    if isinstance(value, list) and value and value.count(value[0]) == len(value):
        value = value[0]
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 1 << 32:
        raise Incompatible("GGUF metadata needs one positive whole number here", key=key, got=str(value)[:60])
    return value


def _real(file: GgufFile, key: str, default: float | None = None) -> float:
    value = file.typed(file.key(key), object, default)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise Incompatible("GGUF metadata needs a number here", key=key, got=str(value)[:60])
    return shortest(value)


def _vocab_size(file: GgufFile) -> int:
    embeddings = file.tensors.get("token_embd.weight")
    if embeddings is None:
        raise Incompatible("GGUF tensor is missing", tensor="token_embd.weight")
    return embeddings.shape[0]
