"""Qwen2 and Qwen2.5: a Llama with biases on queries, keys and values, and windows on its upper layers if asked for."""

from __future__ import annotations

from dataclasses import replace

from pdserve.engine.config_reader import ConfigReader
from pdserve.engine.model_config import ModelConfig
from pdserve.engine.models.family import Family


def _configure(config: ConfigReader) -> ModelConfig:
    """Source: https://huggingface.co/docs/transformers/model_doc/qwen2."""
    common = config.common(config.rope())
    return replace(common, activation=config.silu(), qkv_bias=True, windows=config.upper_windows())


QWEN2 = Family(configure=_configure)
