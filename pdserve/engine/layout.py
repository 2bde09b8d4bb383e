"""The layout of the KV pool: `[num_blocks, kv_heads, layers, 2, block_size, head_dim]`, a block one range of bytes."""

from __future__ import annotations

import json
from dataclasses import dataclass

DIMS = ("kv_heads", "layers", "kv", "block_size", "head_dim")


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLayout:
    """Shape of one block and the number of blocks; the transfer layer knows only (block id, offset, length)."""

    num_blocks: int
    kv_heads: int
    layers: int
    block_size: int
    head_dim: int
    dtype: str
    item_bytes: int

    @property
    def head_bytes(self) -> int:
        """Bytes of one KV head of one block: the unit in which tensor-parallel ranks share a block."""
        return self.layers * 2 * self.block_size * self.head_dim * self.item_bytes

    @property
    def block_bytes(self) -> int:
        return self.kv_heads * self.head_bytes

    @property
    def pool_bytes(self) -> int:
        return self.num_blocks * self.block_bytes

    @property
    def token_bytes(self) -> int:
        return self.block_bytes // self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold so many positions."""
        return -(-num_tokens // self.block_size)

    def wire_json(self) -> str:
        """What two sides of a link must agree on: named dims and strides in bytes, without the pool's size."""
        sizes = (self.kv_heads, self.layers, 2, self.block_size, self.head_dim)
        strides: list[int] = []
        stride = self.item_bytes
        for size in reversed(sizes):
            strides.insert(0, stride)
            stride *= size
        value = {"dims": list(DIMS), "sizes": list(sizes), "strides": strides, "dtype": self.dtype}
        return json.dumps(value, separators=(",", ":"))
