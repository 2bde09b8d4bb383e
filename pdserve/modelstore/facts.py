"""What a model folder holds, from its headers alone: for `pdserve model inspect`."""

from __future__ import annotations

import json
import math
import struct
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdserve.errors import Incompatible

_CACHE_VALUE_BYTES = {"bfloat16": 2, "float32": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Numbers of one model.

    tensor_types       type → number of tensors, most frequent first
    kv_bytes_per_token by the dtype that the engine computes in
    """

    architecture: str
    num_parameters: int
    weights_bytes: int
    tensor_types: dict[str, int]
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    window_tokens: int
    tied_embeddings: bool
    kv_bytes_per_token: dict[str, int]

    def num_blocks(self, memory_bytes: int, block_size: int, dtype: str) -> int:
        """KV blocks of block_size tokens that fit."""
        return memory_bytes // (self.kv_bytes_per_token[dtype] * block_size)


def read_facts(folder: Path) -> ModelFacts:
    """Read a checked model folder (see `resolve`). Raises Incompatible naming the key or file that is wrong."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config = config.get("text_config", config)
    hidden_size, num_heads = _need(config, "hidden_size"), _need(config, "num_attention_heads")
    num_kv_heads = int(config.get("num_key_value_heads") or num_heads)
    head_dim = int(config.get("head_dim") or hidden_size // num_heads)
    num_layers = _need(config, "num_hidden_layers")
    tensors = _gguf_tensors(folder) if (folder / "tensors.json").is_file() else _safetensors(folder)
    types = Counter(kind for kind, _, _ in tensors)
    return ModelFacts(
        architecture=", ".join(str(name) for name in config.get("architectures") or ["?"]),
        num_parameters=sum(math.prod(shape) for _, shape, _ in tensors),
        weights_bytes=sum(num_bytes for _, _, num_bytes in tensors),
        tensor_types=dict(types.most_common()),
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=_need(config, "vocab_size"),
        window_tokens=_need(config, "max_position_embeddings"),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        kv_bytes_per_token={
            dtype: num_layers * 2 * num_kv_heads * head_dim * size
            for dtype, size in _CACHE_VALUE_BYTES.items()
        },
    )


def _need(config: dict[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value <= 0:
        raise Incompatible("config.json lacks a positive whole number", key=key, got=value)
    return value


def _gguf_tensors(folder: Path) -> list[tuple[str, list[int], int]]:
    index = json.loads((folder / "tensors.json").read_text(encoding="utf-8"))
    return [(entry["type"], entry["shape"], entry["nbytes"]) for entry in index["tensors"].values()]


def _safetensors(folder: Path) -> list[tuple[str, list[int], int]]:
    """Source: the safetensors format: 8 bytes of length, then a JSON header."""
    found = []
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            head = file.read(8)
            (length,) = struct.unpack("<Q", head) if len(head) == 8 else (0,)
            if not 2 <= length <= path.stat().st_size - 8:
                raise Incompatible("safetensors file is cut short", file=path.name)
            header = json.loads(file.read(length))
        for name, entry in header.items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                found.append((str(entry["dtype"]), list(entry["shape"]), end - begin))
    return found
