"""Mistral: a Llama whose layers all see a window."""

from __future__ import annotations

from dataclasses import replace

from pdserve.engine.config_reader import ConfigReader
from pdserve.engine.model_config import ModelConfig
from pdserve.engine.models.family import Family

_DEFAULT_WINDOW = 4096


def _configure(config: ConfigReader) -> ModelConfig:
    """Source: https://huggingface.co/docs/transformers/model_doc/mistral."""
    common = config.common(config.rope())
    window = config.window(_DEFAULT_WINDOW)
    return replace(common, activation=config.silu(), windows=(window,) * common.num_layers)


MISTRAL = Family(configure=_configure)
