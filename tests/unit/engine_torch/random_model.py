"""Small Llama folders with random weights, for tests that want a real model in milliseconds."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

SMALL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 160,
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}

# The widths of the packaged model, as changes to SMALL: kernels choose their way by them.
WIDE: dict[str, Any] = {
    "hidden_size": 576,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "intermediate_size": 1536,
}


def llama_tensors(config: dict[str, Any], seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """All tensors of such a model by their Hugging Face names."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        values: Tensor = torch.randn(*shape, generator=generator) / math.sqrt(shape[-1])
        return values.to(dtype)

    hidden, ffn = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    shapes = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (ffn, hidden),
        "mlp.up_proj": (ffn, hidden),
        "mlp.down_proj": (hidden, ffn),
    }
    has_bias = {"self_attn": config.get("attention_bias", False), "mlp": config.get("mlp_bias", False)}
    tensors = {"model.embed_tokens.weight": random(config["vocab_size"], hidden) * 2}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for name, shape in shapes.items():
            tensors[f"{prefix}{name}.weight"] = random(*shape)
            if has_bias[name.split(".")[0]]:
                tensors[f"{prefix}{name}.bias"] = random(shape[0])
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{name}.weight"] = 1 + random(hidden)
    tensors["model.norm.weight"] = 1 + random(hidden)
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = random(config["vocab_size"], hidden)
    return tensors


def write_random_model(
    folder: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32, shards: int = 1, **changes: Any
) -> Path:
    """Write config.json and safetensors into a folder; `changes` replace keys of SMALL's config."""
    config = SMALL | changes
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = llama_tensors(config, seed, dtype)
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = {
            name: tensor for index, (name, tensor) in enumerate(tensors.items()) if index % shards == shard
        }
        save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    return folder
