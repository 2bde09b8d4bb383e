"""Qwen3-MoE: a Qwen3 with experts in all layers, or in all but some."""

from __future__ import annotations

import functools
from dataclasses import replace

from pdserve.engine.config_reader import ConfigReader
from pdserve.engine.model_config import ModelConfig
from pdserve.engine.models.family import Family
from pdserve.engine.models.sparse import ExpertNames, SparseFeedForwards, read_experts
from pdserve.modelstore.errors import BadModel

_NAMES = ExpertNames(
    router="mlp.gate",
    gate="mlp.experts.{}.gate_proj",
    up="mlp.experts.{}.up_proj",
    down="mlp.experts.{}.down_proj",
)
_DEFAULT_WINDOW = 4096
_DEFAULT_CHOSEN = 8


def _configure(config: ConfigReader) -> ModelConfig:
    """Source: https://huggingface.co/docs/transformers/model_doc/qwen3_moe."""
    common = config.common(config.rope())
    has_bias = config.flag("attention_bias")
    experts = read_experts(
        config,
        ffn_size=config.integer("moe_intermediate_size"),
        num_chosen=_DEFAULT_CHOSEN,
        is_normalised=config.flag("norm_topk_prob"),
        layers=_sparse_layers(config, common.num_layers),
    )
    # Unlike Qwen3's, its window is for all layers.
    window = config.window(_DEFAULT_WINDOW) if config.flag("use_sliding_window") else 0
    return replace(
        common,
        activation=config.silu(),
        qkv_bias=has_bias,
        output_bias=has_bias,
        has_qk_norm=True,
        windows=(window,) * common.num_layers,
        experts=experts,
    )


def _sparse_layers(config: ConfigReader, num_layers: int) -> tuple[bool, ...]:
    """Every decoder_sparse_step-th layer has experts, but for those of mlp_only_layers."""
    step = config.integer("decoder_sparse_step", 1)
    dense = config.raw.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise config.bad("config.json needs a list of layers here", "mlp_only_layers")
    for layer in dense:
        if not isinstance(layer, int) or isinstance(layer, bool) or not 0 <= layer < num_layers:
            raise BadModel("no such layer", key="mlp_only_layers", value=layer, num_layers=num_layers)
    return tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers))


QWEN3_MOE = Family(configure=_configure, feed_forwards=functools.partial(SparseFeedForwards, _NAMES))
