"""The part of a config.json that concerns text, where a model has several kinds of input."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pdserve.errors import Incompatible

T = TypeVar("T")

# What published files leave out of text_config, since transformers' Gemma3TextConfig has it as default.
_TAKEN_FOR_GRANTED: dict[str, dict[str, Any]] = {
    "Gemma3ForConditionalGeneration": {
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
    },
}
# What stands before the names of the text model's tensors, in files of several years, and what it stands for.
_PREFIXES: dict[str, tuple[tuple[str, str], ...]] = {
    "Gemma3ForConditionalGeneration": (
        ("language_model.", ""),
        ("model.language_model.", "model."),
        ("lm_head.", "lm_head."),
    ),
}


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json's content as if the model knew text only; the class stays that of the whole.

    Raises Incompatible if text_config is no object.
    """
    if "text_config" not in config:
        return dict(config)
    text = config["text_config"]
    if not isinstance(text, dict):
        raise Incompatible("config.json needs an object here", key="text_config", got=text)
    granted = _TAKEN_FOR_GRANTED.get(str((config.get("architectures") or ["?"])[0]), {})
    outside = {key: config[key] for key in ("architectures",) if key in config}
    return {**granted, **text, **outside}


def text_tensors(architecture: str, tensors: Mapping[str, T]) -> dict[str, T]:
    """The text model's tensors under the names that they have in a model that knows text only."""
    found: dict[str, T] = {}
    for prefix, instead in _PREFIXES.get(architecture, (("", ""),)):
        for name, each in tensors.items():
            if name.startswith(prefix):
                found[instead + name.removeprefix(prefix)] = each
    return found
