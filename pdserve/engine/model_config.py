"""The shape of a model, as its config.json says it: what all families share, and what a few of them add."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pdserve.modelstore.errors import BadModel


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding: base frequency and how long contexts stretch it.

    kind              "default"; "linear" (positions divided by factor); "llama3" (low frequencies divided by factor,
                      high ones kept, a ramp between); "yarn" (the same with another ramp); "longrope" (each frequency
                      has its divisor); "dynamic" (changes only behind max_position_embeddings, which is the window
                      here, so inside it it is the default)
    beta_fast, beta_slow, is_truncated  yarn: turns within original_positions where the ramp begins and ends; whether
                      these ends are rounded to whole pairs
    divisors          longrope: of each frequency. Behind original_positions, long_divisors take their place, for all
                      positions of a text: `ModelConfig.stretched`
    long_positions    longrope: how far those reach
    attention_factor  yarn, longrope: what turned queries and keys are multiplied by
    Source: https://huggingface.co/docs/transformers, "Utilities for Rotary Embedding".
    """

    base: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    is_truncated: bool = True
    divisors: tuple[float, ...] = ()
    long_divisors: tuple[float, ...] = ()
    long_positions: int = 0
    attention_factor: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """Mixture of experts.

    num_chosen     experts that each token goes through
    ffn_size       of one expert
    is_normalised  the chosen ones' weights add up to 1
    layers         of each layer: whether it has experts, or one feed-forward as dense models do
    """

    num_experts: int
    num_chosen: int
    ffn_size: int
    is_normalised: bool
    layers: tuple[bool, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer's shape. What has a default is what most families don't have.

    max_positions      context window in tokens
    windows            of each layer: how many positions a token sees, itself the last; 0: all
    local_rope         of the layers that have a window, where it isn't that of the others
    rotary_dim         how much of a head is turned, from its beginning
    attention_scale    what products of queries and keys are multiplied by
    attention_softcap, final_softcap  scores or logits x become cap · tanh(x / cap); 0: they stay
    embedding_scale    what embeddings are multiplied by
    activation         of the feed-forward's gate: "silu" or "gelu_tanh"
    has_qk_norm        each head of queries and keys is normalised before it is turned
    has_post_norms     the outputs of attention and feed-forward are normalised before they are added
    norm_offset        what is added to the weights of all norms
    experts            None: all layers are dense
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    norm_eps: float
    max_positions: int
    windows: tuple[int, ...]
    rope: RopeConfig
    rotary_dim: int
    attention_scale: float
    tied_embeddings: bool
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    local_rope: RopeConfig | None = None
    attention_softcap: float = 0.0
    final_softcap: float = 0.0
    embedding_scale: float = 1.0
    activation: str = "silu"
    has_qk_norm: bool = False
    has_post_norms: bool = False
    norm_offset: float = 0.0
    experts: ExpertsConfig | None = None

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def can_stretch(self) -> bool:
        """Whether its rotary embedding has other frequencies for long contexts."""
        return bool(self.rope.long_divisors)

    def stretched(self) -> ModelConfig:
        """With the frequencies and the window of long contexts, for short texts too, if it can stretch."""
        if not self.can_stretch:
            return self
        rope = replace(self.rope, divisors=self.rope.long_divisors)
        return replace(self, rope=rope, max_positions=self.rope.long_positions)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of the model folder. Raises BadModel with the file's name."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadModel("the model folder lacks a file", file=str(path)) from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise BadModel("a file of the model folder is not JSON", file=str(path), reason=str(error)) from None
    if not isinstance(value, dict):
        raise BadModel("a file of the model folder is not a JSON object", file=str(path))
    return value
