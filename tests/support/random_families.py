"""Small random models of every family, made and saved by transformers, as one of each variant that matters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

VOCAB_SIZE = 320
WINDOW = 24
BASE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 128,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0 + 0.05 * index for index in range(6)],
    "long_factor": [1.0 + 2.5 * index for index in range(6)],
    "partial_rotary_factor": 0.75,
}
GEMMA3: dict[str, Any] = {"num_hidden_layers": 6, "query_pre_attn_scalar": 20, "sliding_window": WINDOW}
GEMMA3_PATTERN = ["sliding_attention"] * 2 + ["full_attention"]
GEMMA3_ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
MIXTRAL: dict[str, Any] = {"num_local_experts": 6, "num_experts_per_tok": 2}
QWEN3_MOE: dict[str, Any] = {
    "head_dim": 32, "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 32,
}  # fmt: skip

# name: (class in transformers, what its config adds to BASE)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": True}),
    "llama yarn": ("Llama", {"rope_parameters": YARN}),
    "llama yarn, all keys": (
        "Llama",
        {
            "rope_parameters": YARN
            | {"beta_fast": 16.0, "beta_slow": 2.0, "truncate": False, "mscale": 0.8, "mscale_all_dim": 0.5}
        },
    ),
    "llama yarn, attention factor": ("Llama", {"rope_parameters": YARN | {"attention_factor": 1.7}}),
    "mistral": ("Mistral", {"sliding_window": WINDOW}),
    "mistral without a window": ("Mistral", {"sliding_window": None, "head_dim": 32}),
    "mistral yarn": ("Mistral", {"sliding_window": None, "rope_parameters": YARN}),
    "qwen2": ("Qwen2", {}),
    "qwen2 tied": ("Qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 6}),
    "qwen2 upper windows": (
        "Qwen2",
        {
            "num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": WINDOW,
            "max_window_layers": 1, "layer_types": None,
        },
    ),
    "qwen2 layer types": (
        "Qwen2",
        {
            "use_sliding_window": True, "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "qwen2 yarn": ("Qwen2", {"rope_parameters": YARN}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3 with biases": ("Qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
    "qwen3 upper windows": (
        "Qwen3", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "mixtral": ("Mixtral", MIXTRAL),
    "mixtral window, one expert": (
        "Mixtral", MIXTRAL | {"sliding_window": WINDOW, "num_experts_per_tok": 1},
    ),
    "qwen3 moe": ("Qwen3Moe", QWEN3_MOE | {"norm_topk_prob": True}),
    "qwen3 moe, weights as they are": ("Qwen3Moe", QWEN3_MOE | {"attention_bias": True}),
    "qwen3 moe, some layers dense": (
        "Qwen3Moe",
        QWEN3_MOE | {"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [1]},
    ),
    "qwen3 moe window": (
        "Qwen3Moe", QWEN3_MOE | {"use_sliding_window": True, "sliding_window": WINDOW},
    ),
    "gemma3": ("Gemma3", GEMMA3),
    "gemma3 untied": ("Gemma3", GEMMA3 | {"tie_word_embeddings": False, "attention_bias": True}),
    "gemma3 pattern": (
        "Gemma3",
        GEMMA3 | {"num_hidden_layers": 3, "layer_types": GEMMA3_PATTERN, "rope_parameters": GEMMA3_ROPES},
    ),
    "gemma3 capped": ("Gemma3", GEMMA3 | {"final_logit_softcapping": 3.0}),
    "phi3": ("Phi3", {"num_key_value_heads": 6}),
    "phi3 window": ("Phi3", {"sliding_window": WINDOW}),
    "phi3 partial": ("Phi3", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}),
    "phi4 mini": (
        "Phi3",
        {
            "rope_parameters": LONGROPE, "original_max_position_embeddings": 1536,
            "tie_word_embeddings": True,
        },
    ),
}  # fmt: skip


def save_random(name: str, folder: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """A model of FAMILIES with random weights, norms and biases too, as transformers saves it."""
    import transformers

    family, own = FAMILIES[name]
    config_class = getattr(transformers, "Gemma3TextConfig" if family == "Gemma3" else f"{family}Config")
    config = config_class(**{**BASE, **own, **changes})
    torch.manual_seed(3)
    return _save(getattr(transformers, f"{family}ForCausalLM")(config), family, folder, dtype)


def save_with_images(folder: Path) -> Path:
    """A Gemma 3 that sees images: its text model is one part of it."""
    import transformers

    vision = {
        "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "image_size": 28, "patch_size": 14,
    }  # fmt: skip
    config = transformers.Gemma3Config(
        text_config=BASE | GEMMA3,
        vision_config=vision,
        mm_tokens_per_image=4,
        image_token_index=VOCAB_SIZE - 1,
    )
    torch.manual_seed(3)
    return _save(transformers.Gemma3ForConditionalGeneration(config), "Gemma3", folder, torch.float32)


def _save(model: Any, family: str, folder: Path, dtype: torch.dtype) -> Path:
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                is_norm = "norm" in parameter_name and family != "Gemma3"
                parameter.normal_(mean=1.0 if is_norm else 0.0, std=0.3)
            else:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
    model.to(dtype).save_pretrained(folder)
    return folder
