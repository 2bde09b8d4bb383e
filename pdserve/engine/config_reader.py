"""config.json as a ModelConfig: what all families' files have, and look-ups for the rest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from pdserve.engine.config_section import Section
from pdserve.engine.model_config import ModelConfig, RopeConfig, read_json
from pdserve.engine.rope_reader import read_rope, rope_section
from pdserve.modelstore.errors import BadModel
from pdserve.modelstore.text_config import text_config

DEFAULT_ROPE_BASE = 10_000.0
_QWEN_WINDOW, _QWEN_FIRST = 4096, 28
_LAYER_KINDS = ("full_attention", "sliding_attention")


class Configures(Protocol):
    """Something that knows how to read the config.json of a family."""

    @property
    def configure(self) -> Callable[[ConfigReader], ModelConfig]: ...


_MOST_LAYERS = 10_000


def load_config(folder: Path, supported: Mapping[str, Configures]) -> ModelConfig:
    """Read config.json.

    supported  by architecture name: how its config is read
    Raises BadModel: file or key missing, value of a wrong kind, architecture not supported.
    """
    raw = read_json(folder / "config.json")
    architectures = raw.get("architectures") or []
    if not isinstance(architectures, list) or not all(isinstance(name, str) for name in architectures):
        raise BadModel(
            "config.json needs a list of names here", key="architectures", value=repr(architectures)[:80]
        )
    known = [name for name in architectures if name in supported]
    if not known:
        raise BadModel(
            "this architecture is not supported",
            architecture=", ".join(architectures) or "(none given)",
            supported=", ".join(supported),
        )
    return supported[known[0]].configure(ConfigReader(text_config(raw), known[0]))


class ConfigReader(Section):
    """One config.json, for a family's `configure`."""

    def __init__(self, raw: Mapping[str, Any], architecture: str) -> None:
        super().__init__(raw)
        self._architecture = architecture

    def common(self, rope: RopeConfig, *, norm_eps: float = 1e-6, is_tied: bool = False) -> ModelConfig:
        """What all families have: whole heads turned, every layer sees all.

        norm_eps, is_tied  the family's defaults
        """
        num_heads = self.integer("num_attention_heads")
        num_kv_heads = self.integer("num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            raise BadModel("heads don't divide into KV heads", num_heads=num_heads, num_kv_heads=num_kv_heads)
        num_layers = self.num_layers
        return ModelConfig(
            architecture=self._architecture,
            vocab_size=self.integer("vocab_size"),
            hidden_size=self.integer("hidden_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=self.head_dim,
            ffn_size=self.integer("intermediate_size"),
            norm_eps=self.number("rms_norm_eps", norm_eps),
            max_positions=self._max_positions(rope),
            windows=(0,) * num_layers,
            rope=rope,
            rotary_dim=self.head_dim,
            attention_scale=self.head_dim**-0.5,
            tied_embeddings=self.flag("tie_word_embeddings", is_tied),
        )

    @property
    def num_layers(self) -> int:
        num_layers = self.integer("num_hidden_layers")
        if num_layers > _MOST_LAYERS:
            raise self.bad(
                "config.json names more layers than any model has", "num_hidden_layers", limit=_MOST_LAYERS
            )
        return num_layers

    @property
    def head_dim(self) -> int:
        head_dim = self.integer(
            "head_dim", self.integer("hidden_size") // self.integer("num_attention_heads")
        )
        if head_dim % 2:
            raise BadModel("head size must be even: halves of a head are turned", head_dim=head_dim)
        return head_dim

    def rope(self, base: float = DEFAULT_ROPE_BASE) -> RopeConfig:
        """The one rotary embedding of whole heads; base: the family's default.

        Raises BadModel if parts of heads are turned, or layers differ.
        """
        section = rope_section(self)
        for part in (self, section):
            if part.number("partial_rotary_factor", 1.0) != 1.0:
                raise part.bad("models of this class rotate whole heads", "partial_rotary_factor")
        for key, value in section.raw.items():
            if isinstance(value, Mapping):
                raise section.bad("models of this class have one rotary embedding", key)
        return read_rope(self, section, self.number("rope_theta", base), self.head_dim)

    def silu(self) -> str:
        """The activation of a family that knows no other."""
        return self.choice("hidden_act", {"silu": "silu"}, "silu")

    def window(self, default: int | None = None) -> int:
        """How many positions a layer with a window sees; 0: none has one, as null says. default: without the key."""
        return (
            0 if self.raw.get("sliding_window", default) is None else self.integer("sliding_window", default)
        )

    def upper_windows(self) -> tuple[int, ...]:
        """Qwen's rule: with use_sliding_window, and by layer_types or else from max_window_layers on."""
        window = self.window(_QWEN_WINDOW) if self.flag("use_sliding_window") else 0
        first = self.raw.get("max_window_layers")
        first = _QWEN_FIRST if first is None else first
        if not isinstance(first, int) or isinstance(first, bool) or first < 0:
            raise self.bad("config.json needs a whole number here", "max_window_layers")
        slides = [bool(window) and layer >= first for layer in range(self.num_layers)]
        return self.layer_windows(window, slides)

    def layer_windows(self, window: int, usual: Sequence[bool]) -> tuple[int, ...]:
        """The window of each layer that slides by layer_types; without that key, of those that usually do."""
        named = self.raw.get("layer_types")
        if named is None:
            return tuple(window if slides else 0 for slides in usual)
        if not isinstance(named, list) or len(named) != len(usual):
            raise self.bad("config.json needs one entry per layer here", "layer_types", want=len(usual))
        for kind in named:
            if kind not in _LAYER_KINDS:
                raise BadModel(
                    "this kind of layer is not supported",
                    key="layer_types",
                    value=kind,
                    supported=", ".join(_LAYER_KINDS),
                )
        if "sliding_attention" in named and not window:
            raise self.bad("sliding layers need a window", "sliding_window")
        return tuple(window if kind == "sliding_attention" else 0 for kind in named)

    def _max_positions(self, rope: RopeConfig) -> int:
        """The window. Of longrope its first one: behind it all frequencies change, those of cached keys as well."""
        positions = self.integer("max_position_embeddings")
        if rope.kind == "longrope":
            return min(positions, rope.original_positions)
        if rope.kind == "yarn":  # model cards say to add it, and leave the window as it was
            return max(positions, int(rope.original_positions * rope.factor))
        return positions
