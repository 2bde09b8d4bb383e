"""What a model's config.json says, as far as the engine needs it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdserve.errors import Incompatible

ROPE_KINDS = ("default", "linear", "dynamic", "llama3")


class BadModel(Incompatible):
    """A model folder that can't be served: the message names the file, tensor or key, and what was expected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding: base frequency and how long contexts stretch it.

    kind  "default"; "linear" (positions divided by factor); "llama3" (low frequencies divided by factor, high ones
          kept, a ramp between); "dynamic" (changes only behind max_position_embeddings, which is the window here, so
          inside it it is the default)
    Source: https://huggingface.co/docs/transformers, "Utilities for Rotary Embedding".
    """

    base: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer's shape; `max_positions` is its context window in tokens."""

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
    rope: RopeConfig
    tied_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    eos_token_ids: tuple[int, ...]

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads


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


def load_config(folder: Path, supported: Mapping[str, object]) -> ModelConfig:
    """Read config.json (and the end-of-sequence ids of generation_config.json).

    supported  architecture names that the engine has a model for
    Raises BadModel: file or key missing, value of a wrong kind, architecture not supported.
    """
    raw = read_json(folder / "config.json")
    architectures = raw.get("architectures") or []
    known = [name for name in architectures if name in supported]
    if not known:
        raise BadModel(
            "no model of this architecture is built in",
            architecture=", ".join(map(str, architectures)) or "(none given)",
            supported=", ".join(supported),
        )
    return _Reader(folder, raw).config(known[0])


class _Reader:
    """Typed look-ups in one config.json."""

    def __init__(self, folder: Path, raw: Mapping[str, Any]) -> None:
        self._folder = folder
        self._raw = raw

    def config(self, architecture: str) -> ModelConfig:
        act = self._raw.get("hidden_act", "silu")
        if act != "silu":
            raise BadModel("this activation is not supported", key="hidden_act", value=act, supported="silu")
        num_heads = self._int("num_attention_heads")
        num_kv_heads = self._int("num_key_value_heads", num_heads)
        hidden_size = self._int("hidden_size")
        head_dim = self._int("head_dim", hidden_size // num_heads)
        if num_heads % num_kv_heads:
            raise BadModel("heads don't divide into KV heads", num_heads=num_heads, num_kv_heads=num_kv_heads)
        if head_dim % 4:
            raise BadModel("head size must be a multiple of 4", head_dim=head_dim)
        max_positions = self._int("max_position_embeddings")
        return ModelConfig(
            architecture=architecture,
            vocab_size=self._int("vocab_size"),
            hidden_size=hidden_size,
            num_layers=self._int("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            ffn_size=self._int("intermediate_size"),
            norm_eps=self._float(self._raw, "rms_norm_eps", 1e-6),
            max_positions=max_positions,
            rope=self._rope(max_positions),
            tied_embeddings=bool(self._raw.get("tie_word_embeddings", False)),
            attention_bias=bool(self._raw.get("attention_bias", False)),
            mlp_bias=bool(self._raw.get("mlp_bias", False)),
            eos_token_ids=self._eos(),
        )

    def _rope(self, max_positions: int) -> RopeConfig:
        # Newer files hold everything in rope_parameters, older ones rope_theta and rope_scaling.
        scaling: Mapping[str, Any] = self._raw.get("rope_parameters") or self._raw.get("rope_scaling") or {}
        kind = str(scaling.get("rope_type", scaling.get("type", "default")))
        if kind not in ROPE_KINDS:
            raise BadModel(
                "this rope scaling is not supported", rope_type=kind, supported=", ".join(ROPE_KINDS)
            )
        theta = scaling if "rope_theta" in scaling else self._raw
        return RopeConfig(
            base=self._float(theta, "rope_theta", 10_000.0),
            kind=kind,
            factor=self._float(scaling, "factor", 1.0),
            low_freq_factor=self._float(scaling, "low_freq_factor", 1.0),
            high_freq_factor=self._float(scaling, "high_freq_factor", 4.0),
            original_positions=int(scaling.get("original_max_position_embeddings") or max_positions),
        )

    def _eos(self) -> tuple[int, ...]:
        generation = self._folder / "generation_config.json"
        value = read_json(generation).get("eos_token_id") if generation.exists() else None
        if value is None:
            value = self._raw.get("eos_token_id")
        if value is None:
            return ()
        return tuple(int(token) for token in value) if isinstance(value, list) else (int(value),)

    def _int(self, key: str, default: int | None = None) -> int:
        value = self._raw.get(key)
        if value is None:
            value = default
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise BadModel("config.json needs a positive integer here", key=key, value=value)
        return value

    def _float(self, source: Mapping[str, Any], key: str, default: float) -> float:
        value = source.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
            raise BadModel("config.json needs a positive number here", key=key, value=value)
        return float(value)
