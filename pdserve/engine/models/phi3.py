"""Phi-3 and Phi-4-mini: fused projections, a part of each head turned, longrope."""

from __future__ import annotations

from dataclasses import replace

from pdserve.engine.config_reader import DEFAULT_ROPE_BASE, ConfigReader
from pdserve.engine.model_config import ModelConfig
from pdserve.engine.models.family import Family
from pdserve.engine.models.feed_forward import FeedForward, GatedFeedForward
from pdserve.engine.models.self_attention import Qkv
from pdserve.engine.models.tensors import LayerTensors, Projection
from pdserve.engine.numerics import Precision
from pdserve.engine.rope_reader import read_rope, rope_section

_NORM_EPS = 1e-5
# longrope was called "su" and "yarn" at first.
_ROPE_KINDS = {"default": "default", "longrope": "longrope", "su": "longrope", "yarn": "longrope"}


def _configure(config: ConfigReader) -> ModelConfig:
    """Source: https://huggingface.co/docs/transformers/model_doc/phi3."""
    section = rope_section(config)
    source = section if "partial_rotary_factor" in section.raw else config
    rotary_dim = int(config.head_dim * source.number("partial_rotary_factor", 1.0))
    if rotary_dim % 2 or not 0 < rotary_dim <= config.head_dim:
        raise source.bad(
            "a whole number of pairs must be rotated", "partial_rotary_factor", turned=rotary_dim
        )
    base = config.number("rope_theta", DEFAULT_ROPE_BASE)
    common = config.common(read_rope(config, section, base, rotary_dim, _ROPE_KINDS), norm_eps=_NORM_EPS)
    return replace(
        common,
        activation=config.silu(),
        rotary_dim=rotary_dim,
        windows=(config.window(),) * common.num_layers,
    )


def _load_qkv(config: ModelConfig, tensors: LayerTensors) -> Qkv:
    """Rows of queries, then keys, then values."""
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    fused = tensors.matrix("self_attn.qkv_proj", queries + 2 * keys, config.hidden_size)
    q, k, v = fused.split([queries, keys, keys])
    return Qkv(Projection(q, None), Projection(k, None), Projection(v, None))


def _make_feed_forward(config: ModelConfig, tensors: LayerTensors, precision: Precision) -> FeedForward:
    hidden, ffn = config.hidden_size, config.ffn_size
    part = tensors.shard.part(ffn)
    gate_up = tensors.projection("mlp.gate_up_proj", 2 * ffn, hidden).paired_outputs(part)
    down = tensors.projection("mlp.down_proj", hidden, ffn).inputs(part, adds_bias=False)
    return GatedFeedForward(gate_up, down, config.activation, precision)


PHI3 = Family(configure=_configure, load_qkv=_load_qkv, feed_forwards=lambda: _make_feed_forward)
