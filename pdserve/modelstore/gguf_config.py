"""`config.json` and `generation_config.json` from GGUF metadata, in Hugging Face's words."""

from __future__ import annotations

import mmap
import struct
from typing import Any

from pdserve.errors import Incompatible
from pdserve.modelstore.gguf_file import GgufFile

# Tokens that end a turn in common chat templates; one that the file's own template uses ends generation too.
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>", "<|eom_id|>")
_CONTROL = 3
# The constants of Llama 3.1's RoPE scaling; GGUF files carry only the table computed from them.
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_OLD_CONTEXT = 1.0, 4.0, 8192


def model_config(file: GgufFile) -> dict[str, Any]:
    """The config of a GGUF file. Raises Incompatible for architectures that can't be imported yet."""
    architecture = file.architecture()
    makers = {"llama": _llama}
    if architecture not in makers:
        raise Incompatible(
            "GGUF architecture is not supported", got=architecture, supported=", ".join(makers)
        )
    return makers[architecture](file)


def generation_config(file: GgufFile) -> dict[str, Any]:
    """Which ids begin and end a text: the file's own, and the end of a chat turn as its template writes it."""
    tokens: list[str] = file.need("tokenizer.ggml.tokens")
    types: list[int] = file.metadata.get("tokenizer.ggml.token_type", [])
    template = str(file.metadata.get("tokenizer.chat_template", ""))
    ends: dict[int, None] = {}
    for key in ("eos_token_id", "eot_token_id", "eom_token_id"):
        token_id = file.metadata.get(f"tokenizer.ggml.{key}")
        if token_id is not None:
            ends[int(token_id)] = None
    for turn_end in _TURN_ENDS:
        if turn_end in template and turn_end in tokens:
            token_id = tokens.index(turn_end)
            if token_id < len(types) and types[token_id] == _CONTROL:
                ends[token_id] = None
    config: dict[str, Any] = {"eos_token_id": list(ends)}
    for name, key in (("bos_token_id", "bos_token_id"), ("pad_token_id", "padding_token_id")):
        if f"tokenizer.ggml.{key}" in file.metadata:
            config[name] = int(file.metadata[f"tokenizer.ggml.{key}"])
    return config


def _llama(file: GgufFile) -> dict[str, Any]:
    if file.own("expert_count"):
        raise Incompatible("GGUF mixture of experts is not supported", architecture="llama")
    hidden_size = int(file.need_own("embedding_length"))
    num_heads = int(file.need_own("attention.head_count"))
    head_dim = int(file.own("attention.key_length", hidden_size // num_heads))
    rotary = int(file.own("rope.dimension_count", head_dim))
    if rotary != head_dim:
        raise Incompatible("GGUF partial rotary embedding is not supported", rotary=rotary, head_dim=head_dim)
    names = [tensor.name for tensor in file.tensors]
    context = int(file.need_own("context_length"))
    rope_theta = _shortest(file.own("rope.freq_base", 10_000.0))
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden_size,
        "intermediate_size": int(file.need_own("feed_forward_length")),
        "num_hidden_layers": int(file.need_own("block_count")),
        "num_attention_heads": num_heads,
        "num_key_value_heads": int(file.own("attention.head_count_kv", num_heads)),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": context,
        "rms_norm_eps": _shortest(file.need_own("attention.layer_norm_rms_epsilon")),
        "rope_theta": rope_theta,
        "rope_scaling": _rope_scaling(file, head_dim, rope_theta),
        "vocab_size": _vocab_size(file),
        # The output projection is written only where it isn't the embedding.
        "tie_word_embeddings": "output.weight" not in names,
        "attention_bias": "blk.0.attn_q.bias" in names,
        "mlp_bias": "blk.0.ffn_up.bias" in names,
        "eos_token_id": generation_config(file)["eos_token_id"],
    }
    if "tokenizer.ggml.bos_token_id" in file.metadata:
        config["bos_token_id"] = int(file.metadata["tokenizer.ggml.bos_token_id"])
    return config


def _vocab_size(file: GgufFile) -> int:
    for tensor in file.tensors:
        if tensor.name == "token_embd.weight":
            rows, num_tokens = tensor.shape[0], len(file.need("tokenizer.ggml.tokens"))
            if num_tokens > rows:
                raise Incompatible(
                    "tokenizer doesn't fit the vocabulary", tokens=num_tokens, embedding_rows=rows
                )
            return rows
    raise Incompatible("GGUF tensor is missing", tensor="token_embd.weight")


def _rope_scaling(file: GgufFile, head_dim: int, rope_theta: float) -> dict[str, Any] | None:
    for tensor in file.tensors:
        if tensor.name == "rope_freqs.weight":
            return _llama3_scaling(_floats(file, tensor.offset, tensor.shape[0]), head_dim, rope_theta)
    kind = file.own("rope.scaling.type")
    if kind in (None, "none"):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": _shortest(file.need_own("rope.scaling.factor"))}
    raise Incompatible("GGUF rope scaling is not supported", got=kind, supported="none, linear, llama3")


def _floats(file: GgufFile, offset: int, count: int) -> list[float]:
    with file.path.open("rb") as raw, mmap.mmap(raw.fileno(), 0, access=mmap.ACCESS_READ) as view:
        return list(struct.unpack_from(f"<{count}f", view, offset))


def _llama3_scaling(table: list[float], head_dim: int, rope_theta: float) -> dict[str, Any]:
    """Find the parameters of a table of frequency divisors, and prove them by computing it again.

    table  [head_dim / 2]: what each inverse frequency is divided by, as llama.cpp writes it
    Source: the Llama 3.1 model card's `rope_scaling`, and the formula in "RoPE scaling" of its reference code.
    """
    factor = round(max(table), 4)
    for index, got in enumerate(table):
        wavelength = 2 * 3.141592653589793 * rope_theta ** (2 * index / head_dim)
        want = _llama3_divisor(wavelength, factor)
        if abs(want - got) > 1e-3 * want:
            raise Incompatible("GGUF rope table follows no known scaling", index=index, want=want, got=got)
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LLAMA3_LOW,
        "high_freq_factor": _LLAMA3_HIGH,
        "original_max_position_embeddings": _LLAMA3_OLD_CONTEXT,
    }


def _llama3_divisor(wavelength: float, factor: float) -> float:
    turns = _LLAMA3_OLD_CONTEXT / wavelength
    if turns > _LLAMA3_HIGH:
        return 1.0
    if turns < _LLAMA3_LOW:
        return factor
    smooth = (turns - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW)
    return 1 / ((1 - smooth) / factor + smooth)


def _shortest(value: float) -> float:
    """The shortest decimal of a 32-bit float: 1e-05 where GGUF's float reads as 9.999999747378752e-06."""
    for digits in range(1, 10):
        text = f"{float(value):.{digits}g}"
        if struct.pack("<f", float(text)) == struct.pack("<f", float(value)):
            return float(text)
    return float(value)
