"""How a config.json stretches its rotary embedding, in the words of transformers 4 and 5."""

from __future__ import annotations

import math
from collections.abc import Mapping

from pdserve.engine.config_section import Section
from pdserve.engine.model_config import RopeConfig

KINDS = {name: name for name in ("default", "linear", "dynamic", "llama3", "yarn", "longrope")}


def rope_section(config: Section) -> Section:
    """Newer files hold everything in rope_parameters, older ones rope_theta and rope_scaling; either may be empty."""
    return config.part("rope_scaling") or config.part("rope_parameters") or Section({}, "rope_parameters.")


def read_rope(
    config: Section, rope: Section, base: float, rotary_dim: int, kinds: Mapping[str, str] = KINDS
) -> RopeConfig:
    """One rotary embedding.

    config      the whole file
    rope        the part that describes this embedding
    base        if that part says none
    rotary_dim  how much of a head is turned
    kinds       what the file may call them
    Raises BadModel: an unknown kind, or a key that this kind needs is missing or wrong.
    Source: https://huggingface.co/docs/transformers, "Utilities for Rotary Embedding", formulas and defaults.
    """
    is_old = rope.raw.get("rope_type") is None and rope.raw.get("type") is not None
    kind = rope.choice("type" if is_old else "rope_type", kinds, "default")
    base = rope.number("rope_theta", base)
    if base <= 1:
        raise rope.bad("rotary frequencies need a base above 1", "rope_theta")
    max_positions = config.integer("max_position_embeddings")
    original = rope.integer("original_max_position_embeddings", max_positions)
    # Phi-3 says it outside, and the outer value counts.
    original = config.integer("original_max_position_embeddings", original)
    if kind in ("linear", "dynamic"):
        return RopeConfig(
            base=base, kind=kind, factor=rope.number("factor"), original_positions=max_positions
        )
    if kind == "llama3":
        return RopeConfig(
            base=base,
            kind=kind,
            factor=rope.number("factor"),
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
            original_positions=original,
        )
    if kind == "yarn":
        factor = rope.number("factor", max_positions / original)
        return RopeConfig(
            base=base,
            kind=kind,
            factor=factor,
            original_positions=original,
            beta_fast=rope.number("beta_fast", 32.0),
            beta_slow=rope.number("beta_slow", 1.0),
            is_truncated=rope.flag("truncate", True),
            attention_factor=rope.number("attention_factor", _yarn_attention(rope, factor)),
        )
    if kind == "longrope":
        if not any(part.raw.get("original_max_position_embeddings") for part in (config, rope)):
            raise config.bad("longrope needs its first window", "original_max_position_embeddings")
        factor = rope.number("factor", max_positions / original)
        return RopeConfig(
            base=base,
            kind=kind,
            factor=factor,
            original_positions=original,
            divisors=rope.numbers("short_factor", rotary_dim // 2),
            long_divisors=rope.numbers("long_factor", rotary_dim // 2),
            long_positions=max_positions,
            attention_factor=rope.number("attention_factor", _longrope_attention(factor, original)),
        )
    return RopeConfig(base=base, original_positions=max_positions)


def _yarn_attention(rope: Section, factor: float) -> float:
    """Source: YaRN, arXiv:2309.00071, "Attention scaling"; with DeepSeek's two weights."""

    def scaled(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    above, below = rope.number("mscale", 0.0), rope.number("mscale_all_dim", 0.0)
    return scaled(above) / scaled(below) if above and below else scaled(1.0)


def _longrope_attention(factor: float, original: int) -> float:
    """Source: LongRoPE, arXiv:2402.13753, as transformers has it."""
    return 1.0 if factor <= 1 or original == 1 else math.sqrt(1 + math.log(factor) / math.log(original))
