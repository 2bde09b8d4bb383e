"""Llama 2 and 3, and what is built like them: SmolLM2, TinyLlama, Yi, DeepSeek's distilled Llamas."""

from __future__ import annotations

from dataclasses import replace

from pdserve.engine.config_reader import ConfigReader
from pdserve.engine.model_config import ModelConfig
from pdserve.engine.models.family import Family


def _configure(config: ConfigReader) -> ModelConfig:
    """Source: https://huggingface.co/docs/transformers/model_doc/llama."""
    has_bias = config.flag("attention_bias")
    return replace(
        config.common(config.rope()),
        activation=config.silu(),
        qkv_bias=has_bias,
        output_bias=has_bias,
        mlp_bias=config.flag("mlp_bias"),
    )


LLAMA = Family(configure=_configure)
