"""Qwen3: heads of queries and keys are normalised; no biases, as a rule."""

from __future__ import annotations

from dataclasses import replace

from pdserve.engine.config_reader import ConfigReader
from pdserve.engine.model_config import ModelConfig
from pdserve.engine.models.family import Family


def configure(config: ConfigReader) -> ModelConfig:
    """Source: https://huggingface.co/docs/transformers/model_doc/qwen3."""
    has_bias = config.flag("attention_bias")
    return replace(
        config.common(config.rope()),
        activation=config.silu(),
        qkv_bias=has_bias,
        output_bias=has_bias,
        has_qk_norm=True,
        windows=config.upper_windows(),
    )


QWEN3 = Family(configure=configure)
