"""A transformers model as the GGUF file that llama.cpp's converter would make of it, written by the `gguf` package.

Names come from the package's own table; what the converter does to values (row order of Llama's Q and K, Gemma's norms
plus one, experts stacked) is done here, independently of the import that undoes it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.support.vocabularies import Vocabulary

Array = np.ndarray[Any, Any]
ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "phi3": "phi3",
    "gemma3_text": "gemma3",
}
_EXPERT = re.compile(r"(model\.layers\.\d+\..*experts)\.(\d+)\.(\w+)\.weight")


def write_model(
    path: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Array],
    vocabulary: Vocabulary,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
) -> Path:
    """Write a GGUF file.

    config   content of config.json
    tensors  float32, by their names in the checkpoint
    kind     of all matrices but a router's; vectors stay float32
    """
    architecture = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(path, architecture)
    _write_facts(writer, config)
    vocabulary.write(writer)
    _write_rope_tables(writer, config)
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, int(config["num_hidden_layers"]))
    for name, values in _stacked(tensors).items():
        base, dot, suffix = name.rpartition(".")
        if suffix not in ("weight", "bias"):
            base, dot, suffix = name, ".", "weight"
        new = names.get_name(base)
        assert new is not None, f"no GGUF name for {name}"
        values = _converted(values, new, config)
        stays = values.ndim == 1 or "ffn_gate_inp" in new
        stored = gguf.GGMLQuantizationType.F32 if stays else kind
        writer.add_tensor(f"{new}{dot}{suffix}", gguf.quantize(values, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_facts(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    head_dim = config.get("head_dim") or hidden // heads
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(hidden)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    rope = _rope(config)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    if rope.get("rope_type") in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    original = rope.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
    if original:
        writer.add_rope_scaling_orig_ctx_len(original)
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    num_experts = config.get("num_local_experts") or config.get("num_experts")
    if num_experts:
        writer.add_expert_count(num_experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if config.get("moe_intermediate_size"):
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if config.get("attn_logit_softcapping"):
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    if config.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Of the full layers, where a config has two."""
    rope: dict[str, Any] = config["rope_parameters"]
    return dict(rope.get("full_attention", rope))


def _write_rope_tables(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    rope = _rope(config)
    if rope.get("rope_type") == "longrope":
        for name in ("long", "short"):
            writer.add_tensor(
                f"rope_factors_{name}.weight", np.array(rope[f"{name}_factor"], dtype=np.float32)
            )
    if rope.get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_table(rope, config["head_dim"]))


def llama3_table(rope: Mapping[str, Any], head_dim: int) -> Array:
    """What each frequency is divided by: 1 for fast ones, the factor for slow ones, smooth between."""
    waves = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, head_dim, 2) / head_dim)
    old, low, high = (
        rope["original_max_position_embeddings"],
        rope["low_freq_factor"],
        rope["high_freq_factor"],
    )
    smooth = np.clip((old / waves - low) / (high - low), 0.0, 1.0)
    table: Array = 1 / ((1 - smooth) / rope["factor"] + smooth)
    return table.astype(np.float32)


def _stacked(tensors: Mapping[str, Array]) -> dict[str, Array]:
    """Experts of one kind in one layer become one tensor, in the order of their numbers."""
    single: dict[str, Array] = {}
    experts: dict[str, dict[int, Array]] = {}
    for name, values in tensors.items():
        match = _EXPERT.fullmatch(name)
        if match is None:
            single[name] = values
        else:
            experts.setdefault(f"{match[1]}.{match[3]}", {})[int(match[2])] = values
    for name, by_number in experts.items():
        single[f"{name}.weight"] = np.stack([by_number[number] for number in sorted(by_number)])
    return single


def _converted(values: Array, name: str, config: Mapping[str, Any]) -> Array:
    architecture = ARCHITECTURES[config["model_type"]]
    if architecture == "gemma3" and name.endswith("norm"):
        return values + np.float32(1.0)
    if architecture == "llama" and name.endswith(("attn_q", "attn_k")):
        heads = config["num_attention_heads" if name.endswith("q") else "num_key_value_heads"]
        halves = values.reshape(heads, 2, -1, *values.shape[1:])
        return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)
    return values
