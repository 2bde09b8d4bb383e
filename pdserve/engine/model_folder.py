"""A model folder as a runner opens it, whatever device it computes on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdserve.engine.attention import Heads
from pdserve.engine.config_reader import load_config
from pdserve.engine.layout import KvLayout
from pdserve.engine.model_config import ModelConfig, read_json
from pdserve.engine.models import MODELS
from pdserve.engine.models.decoder import Decoder
from pdserve.engine.numerics import Precision
from pdserve.engine.parallel.shard import Shard
from pdserve.engine.parallel.team import ALONE, Team
from pdserve.engine.port import ModelCard
from pdserve.engine.weights import Weights
from pdserve.modelstore.progress import ByteProgress


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """identity: what makes it another model than others, for the weights' fingerprint."""

    name: str
    config: ModelConfig
    identity: dict[str, Any]
    weights: Weights

    @classmethod
    def open(cls, path: Path, *, long_context: bool, progress: ByteProgress | None) -> ModelFolder:
        """long_context, progress: as of `TorchRunner`. Raises BadModel: the folder can't be served."""
        config = load_config(path, MODELS)
        identity = read_json(path / "config.json")
        if long_context and config.can_stretch:
            config = config.stretched()
            identity["long_context"] = True  # other KV from the same weights
        return cls(path.name, config, identity, Weights(path, config, progress))

    def decoder(self, precision: Precision, team: Team = ALONE) -> Decoder:
        return Decoder(self.config, MODELS[self.config.architecture], self.weights, precision, team)

    def heads(self, shard: Shard = ALONE.shard) -> Heads:
        config = shard.config(self.config)
        return Heads(
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            scale=config.attention_scale,
            softcap=config.attention_softcap,
            windows=config.windows,
        )

    def layout(self, precision: Precision, block_size: int, num_blocks: int = 0) -> KvLayout:
        return KvLayout(
            num_blocks=num_blocks,
            kv_heads=self.config.num_kv_heads,
            layers=self.config.num_layers,
            block_size=block_size,
            head_dim=self.config.head_dim,
            dtype=str(precision.kv).removeprefix("torch."),
            item_bytes=precision.kv.itemsize,
        )

    def card(self, numerics: str, *, deterministic: bool = False) -> ModelCard:
        fingerprint = self.weights.fingerprint(self.identity)
        return ModelCard(
            name=self.name,
            vocab_size=self.config.vocab_size,
            window_tokens=self.config.max_positions,
            weights_fingerprint=fingerprint,
            numerics=numerics,
            deterministic=deterministic,
            cache_seed=bytes.fromhex(fingerprint),
        )
