"""Gemma 3, text: four norms a layer whose weights are stored minus one, normalised heads, GeGLU, scaled embeddings.

Most layers see a window and have a rotary base of their own; every sixth sees all.
"""

from __future__ import annotations

from dataclasses import replace

from pdserve.engine.config_reader import ConfigReader
from pdserve.engine.config_section import Section
from pdserve.engine.model_config import ModelConfig, RopeConfig
from pdserve.engine.models.family import Family
from pdserve.engine.rope_reader import read_rope

_GLOBAL_BASE, _LOCAL_BASE = 1_000_000.0, 10_000.0
_DEFAULT_WINDOW = 4096
_DEFAULT_PATTERN = 6
_DEFAULT_QUERY_SCALAR = 256.0


def _configure(config: ConfigReader) -> ModelConfig:
    """Source: https://huggingface.co/docs/transformers/model_doc/gemma3, Gemma3TextConfig."""
    if config.flag("use_bidirectional_attention"):
        raise config.bad("only causal attention is supported", "use_bidirectional_attention")
    full, local = _ropes(config)
    common = config.common(full, is_tied=True)
    pattern = config.integer("sliding_window_pattern", _DEFAULT_PATTERN)
    window = config.window(_DEFAULT_WINDOW)
    if not window:
        raise config.bad("sliding layers need a window", "sliding_window")
    slides = [(layer + 1) % pattern != 0 for layer in range(common.num_layers)]
    has_bias = config.flag("attention_bias")
    return replace(
        common,
        activation=config.choice(
            "hidden_activation", {"gelu_pytorch_tanh": "gelu_tanh"}, "gelu_pytorch_tanh"
        ),
        windows=config.layer_windows(window, slides),
        local_rope=local,
        attention_scale=config.number("query_pre_attn_scalar", _DEFAULT_QUERY_SCALAR) ** -0.5,
        attention_softcap=config.number("attn_logit_softcapping", 0.0),
        final_softcap=config.number("final_logit_softcapping", 0.0),
        embedding_scale=common.hidden_size**0.5,
        qkv_bias=has_bias,
        output_bias=has_bias,
        has_qk_norm=True,
        has_post_norms=True,
        norm_offset=1.0,
    )


def _ropes(config: ConfigReader) -> tuple[RopeConfig, RopeConfig]:
    """Of the layers that see all, and of those with a window: newer files name the layers, older ones have own keys."""
    nested = config.part("rope_parameters") or Section({})
    full = config.part("rope_scaling") or nested.part("full_attention") or Section({})
    local = nested.part("sliding_attention") or Section({})
    return (
        read_rope(config, full, config.number("rope_theta", _GLOBAL_BASE), config.head_dim),
        read_rope(config, local, config.number("rope_local_base_freq", _LOCAL_BASE), config.head_dim),
    )


GEMMA3 = Family(configure=_configure)
