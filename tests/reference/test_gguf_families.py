"""A GGUF file of a transformers model becomes the same config and the same tensors, for each model class."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from pdserve.modelstore.gguf_import import import_gguf
from tests.support.gguf_models import write_model
from tests.support.vocabularies import Vocabulary, byte_level, gemma, llama

BASE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0 + 0.01 * index for index in range(6)],
    "long_factor": [1.0 + 2.5 * index for index in range(6)],
    "original_max_position_embeddings": 64,
    "partial_rotary_factor": 0.75,
}
# name: (model class, its config, vocabulary)
FAMILIES: dict[str, tuple[str, dict[str, Any], Vocabulary]] = {
    "llama": ("Llama", {"head_dim": 16}, llama()),
    "llama with biases": ("Llama", {"attention_bias": True, "mlp_bias": True}, llama()),
    "llama 3.1": ("Llama", {"head_dim": 16, "rope_parameters": LLAMA3_ROPE}, byte_level("llama-bpe")),
    "llama linear": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}},
        llama(),
    ),
    "llama yarn": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 64,
            }
        },
        llama(),
    ),
    "mistral": ("Mistral", {"sliding_window": 32, "head_dim": 16}, llama()),
    "mistral nemo": ("Mistral", {"sliding_window": 32, "head_dim": 32}, byte_level("tekken")),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}, llama()),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}, byte_level("qwen2")),
    "qwen3": ("Qwen3", {"head_dim": 32}, byte_level("qwen2")),
    "qwen3 moe": (
        "Qwen3Moe",
        {
            "head_dim": 32, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
            "norm_topk_prob": True,
        },
        byte_level("qwen2"),
    ),
    "phi3": ("Phi3", {"sliding_window": 48, "pad_token_id": 0}, llama()),
    "phi4 mini": ("Phi3", {"rope_parameters": LONGROPE, "pad_token_id": 0}, byte_level("gpt-4o")),
    "gemma3": (
        "Gemma3",
        {"num_hidden_layers": 7, "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 16},
        gemma(),
    ),
    "gemma3 scaled and capped": (
        "Gemma3",
        {
            "num_hidden_layers": 7, "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 16,
            "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
        gemma(),
    ),
}  # fmt: skip
# What the two configs may differ in: who wrote it, ids and defaults that only training uses.
NOISE = ("transformers_version", "dtype", "_name_or_path", "_sliding_window_pattern", "head_dim")


def saved(name: str, folder: Path) -> tuple[dict[str, Any], dict[str, np.ndarray[Any, Any]]]:
    """A random model saved by transformers: config.json and tensors by checkpoint name."""
    import torch
    import transformers
    from safetensors.numpy import load_file

    family, own, vocabulary = FAMILIES[name]
    is_gemma = family == "Gemma3"
    ids = {"bos_token_id": vocabulary.named["bos"], "eos_token_id": vocabulary.named["eos"]}
    config_class = getattr(transformers, "Gemma3TextConfig" if is_gemma else f"{family}Config")
    config = config_class(**{**BASE, **ids, **own}, vocab_size=len(vocabulary.tokens))
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases, too, else they are all ones or zeros
            parameter.normal_(std=0.3)
    model.save_pretrained(folder)
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


def read(folder: Path, entry: dict[str, Any], config: dict[str, Any]) -> np.ndarray[Any, Any]:
    """One tensor of a model folder, by the documented meaning of tensors.json."""
    content = (folder / "weights.gguf").read_bytes()[entry["offset"] :][: entry["nbytes"]]
    kind = gguf.GGMLQuantizationType[entry["type"]]
    shape = entry["shape"]
    rows = np.frombuffer(content, dtype=np.uint8).reshape(*shape[:-1], -1)
    values: np.ndarray[Any, Any] = np.asarray(gguf.dequantize(rows, kind)).reshape(shape)
    if entry["transform"] == "minus_one":
        return values - np.float32(1.0)
    if entry["transform"] is not None:
        heads = config["num_attention_heads" if entry["transform"].endswith("q") else "num_key_value_heads"]
        return values.reshape(heads, -1, 2, *shape[1:]).swapaxes(1, 2).reshape(shape)
    return values


def imported(name: str, tmp_path: Path, kind: gguf.GGMLQuantizationType) -> tuple[Path, dict[str, Any], Any]:
    config, tensors = saved(name, tmp_path / "saved")
    write_model(tmp_path / "m.gguf", config, tensors, FAMILIES[name][2], kind)
    import_gguf(tmp_path / "m.gguf", tmp_path / "folder")
    return tmp_path / "folder", config, tensors


@pytest.mark.parametrize("name", FAMILIES)
def test_config_and_tensors_are_those_of_the_model(name: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    folder, config, tensors = imported(name, tmp_path, gguf.GGMLQuantizationType.F32)
    want = AutoConfig.from_pretrained(tmp_path / "saved").to_dict()
    got = AutoConfig.from_pretrained(folder).to_dict()
    if not isinstance(want["eos_token_id"], list):
        want["eos_token_id"] = [want["eos_token_id"]]
    for key, value in want.items():
        if key not in NOISE and not (key == "pad_token_id" and value != got[key]):
            assert got[key] == value, key
    entries = json.loads((folder / "tensors.json").read_text())["tensors"]
    assert sorted(entries) == sorted(tensors)
    for tensor_name, values in tensors.items():
        found = read(folder, entries[tensor_name], config)
        assert found.shape == values.shape, tensor_name
        np.testing.assert_allclose(found, values, rtol=0, atol=1e-6, err_msg=tensor_name)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q5_1"])
def test_experts_of_any_type_are_cut_at_whole_blocks(kind: str, tmp_path: Path) -> None:
    folder, config, tensors = imported("qwen3 moe", tmp_path, gguf.GGMLQuantizationType[kind])
    entries = json.loads((folder / "tensors.json").read_text())["tensors"]
    name = "model.layers.1.mlp.experts.5.down_proj.weight"
    assert entries[name]["type"] == kind
    np.testing.assert_allclose(read(folder, entries[name], config), tensors[name], atol=0.05)
