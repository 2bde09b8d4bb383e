"""What a model folder holds, from its headers alone: for `pdserve model inspect`."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdserve.errors import Incompatible
from pdserve.modelstore.expected_tensors import check_tensors, has_own_head
from pdserve.modelstore.families import Sizes
from pdserve.modelstore.quantised_tensors import QuantisedTensor, read_model_tensors
from pdserve.modelstore.stored_tensors import StoredTensor
from pdserve.modelstore.text_config import text_config

_CACHE_VALUE_BYTES = {"bfloat16": 2, "float32": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Numbers of one model, of its text part where it has others.

    dtype              the type that most of the weights' bytes are stored in
    tensor_types       type → number of tensors, most frequent first
    num_experts        of each layer that has them; 0: none
    sliding_window     tokens that a layer with a window sees; 0: all layers see all
    kv_bytes_per_token by the dtype that the engine computes in
    """

    architecture: str
    num_parameters: int
    weights_bytes: int
    dtype: str
    tensor_types: dict[str, int]
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_experts: int
    vocab_size: int
    window_tokens: int
    sliding_window: int
    tied_embeddings: bool
    kv_bytes_per_token: dict[str, int]

    def num_blocks(self, memory_bytes: int, block_size: int, dtype: str) -> int:
        """KV blocks of block_size tokens that fit."""
        return memory_bytes // (self.kv_bytes_per_token[dtype] * block_size)


def read_facts(folder: Path) -> ModelFacts:
    """Read a checked model folder (see `resolve`).

    Raises Incompatible in one line naming the key, file or tensor that is wrong: broken or short files, missing
    tensors, shapes that aren't those of the config.
    """
    whole: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config = text_config(whole)
    found = read_model_tensors(folder, whole)
    tensors: dict[str, StoredTensor | QuantisedTensor] = {**found.stored, **found.quantised}
    check_tensors(config, {name: tensor.shape for name, tensor in tensors.items()}, str(folder))
    sizes = Sizes(config)
    types = Counter(tensor.type for tensor in tensors.values())
    stored_bytes: Counter[str] = Counter()
    for tensor in tensors.values():
        stored_bytes[tensor.type] += tensor.num_bytes
    has_window = config.get("use_sliding_window", True) is not False
    return ModelFacts(
        architecture=", ".join(str(name) for name in config.get("architectures") or ["?"]),
        num_parameters=sum(math.prod(tensor.shape) for tensor in tensors.values()),
        weights_bytes=sum(tensor.num_bytes for tensor in tensors.values()),
        dtype=stored_bytes.most_common(1)[0][0] if stored_bytes else "?",
        tensor_types=dict(types.most_common()),
        num_layers=sizes.num_layers,
        hidden_size=sizes.hidden,
        num_heads=sizes.num_heads,
        num_kv_heads=sizes.num_kv_heads,
        head_dim=sizes.head_dim,
        num_experts=_count(config, "num_local_experts") or _count(config, "num_experts"),
        vocab_size=sizes.need("vocab_size"),
        window_tokens=sizes.need("max_position_embeddings"),
        sliding_window=_count(config, "sliding_window") if has_window else 0,
        tied_embeddings=not has_own_head(config, tensors),
        kv_bytes_per_token={
            dtype: sizes.num_layers * 2 * sizes.keys * size for dtype, size in _CACHE_VALUE_BYTES.items()
        },
    )


def _count(config: dict[str, Any], key: str) -> int:
    """0 without the key."""
    value = config.get(key)
    if value is None:
        return 0
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise Incompatible("config.json needs a whole number here", key=key, got=value)
    return value
