"""Mixtral: a Mistral whose feed-forwards are experts, in all layers."""

from __future__ import annotations

import functools
from dataclasses import replace

from pdserve.engine.config_reader import ConfigReader
from pdserve.engine.model_config import ModelConfig
from pdserve.engine.models.family import Family
from pdserve.engine.models.sparse import ExpertNames, SparseFeedForwards, read_experts

_NAMES = ExpertNames(
    router="block_sparse_moe.gate",
    gate="block_sparse_moe.experts.{}.w1",
    up="block_sparse_moe.experts.{}.w3",
    down="block_sparse_moe.experts.{}.w2",
)
_DEFAULT_ROPE_BASE = 1_000_000.0
_DEFAULT_CHOSEN = 2


def _configure(config: ConfigReader) -> ModelConfig:
    """Source: https://huggingface.co/docs/transformers/model_doc/mixtral."""
    common = config.common(config.rope(_DEFAULT_ROPE_BASE), norm_eps=1e-5)
    experts = read_experts(
        config,
        ffn_size=common.ffn_size,
        num_chosen=_DEFAULT_CHOSEN,
        is_normalised=True,
        layers=(True,) * common.num_layers,
    )
    windows = (config.window(),) * common.num_layers
    return replace(common, activation=config.silu(), windows=windows, experts=experts)


MIXTRAL = Family(configure=_configure, feed_forwards=functools.partial(SparseFeedForwards, _NAMES))
