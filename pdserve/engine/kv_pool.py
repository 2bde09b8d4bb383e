"""The KV pool's bytes, and the one place that knows how blocks, heads and layers lie in them.

    [num_blocks, kv_heads, layers, 2, block_size, head_dim]
     └─ a block is one range of bytes, and so is any range of its heads: what the links move
                            └─ "run": K or V of one layer, head and block: what attention gathers
                                     └─ "slot": one position of a run: what a step writes

Copies go through int64 views: torch moves them at memory speed, 16-bit ones at a fraction of it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pdserve.engine.layout import KvLayout
from pdserve.engine.model_config import BadModel


class KvPool:
    """Owned by the engine; the transfer owner reads and writes single blocks through `memory`."""

    def __init__(self, layout: KvLayout, dtype: torch.dtype) -> None:
        if layout.head_dim * layout.item_bytes % 8:
            raise BadModel("a head must be whole 8-byte words", head_dim=layout.head_dim, dtype=layout.dtype)
        self.layout = layout
        self.dtype = dtype
        # Untouched pages cost nothing; blocks are zeroed when a sequence begins them (`begin_blocks`).
        self._bytes = torch.empty(layout.pool_bytes, dtype=torch.uint8)
        self._blocks = self._bytes.view(layout.num_blocks, layout.block_bytes)
        words = self._bytes.view(torch.int64)
        self._slots = words.view(-1, layout.head_dim * layout.item_bytes // 8)
        self._runs = words.view(-1, layout.block_size * layout.head_dim * layout.item_bytes // 8)
        heads = torch.arange(layout.kv_heads)
        keys_values = torch.arange(2)
        self._head_runs = heads * (layout.layers * 2)
        self._head_slots = (keys_values[:, None] + self._head_runs[None, :]) * layout.block_size
        self._layer_runs = torch.arange(layout.layers) * 2

    @property
    def memory(self) -> memoryview:
        """All bytes, writable."""
        return self._bytes.numpy().data

    def begin_blocks(self, block_ids: list[int]) -> None:
        """Zero blocks that a sequence starts to fill but won't fill in this step.

        Attention reads whole blocks and masks what lies behind a sequence's end; a masked NaN is still a NaN.
        """
        for block_id in block_ids:
            self._blocks[block_id].zero_()

    def slot_index(self, block_ids: Tensor, offsets: Tensor) -> Tensor:
        """Where tokens go: [layers, tokens · 2 · kv_heads] int64, K heads then V heads of each token.

        block_ids, offsets  [tokens] int64
        """
        layout = self.layout
        block_runs = block_ids * (layout.kv_heads * layout.layers * 2)
        first_layer = (
            block_runs[:, None, None] * layout.block_size + offsets[:, None, None] + self._head_slots
        )
        return first_layer.view(1, -1) + self._layer_runs[:, None] * layout.block_size

    def write(self, slots: Tensor, keys_values: Tensor) -> None:
        """Store one layer's new K and V.

        slots        [tokens · 2 · kv_heads] int64: one row of `slot_index`
        keys_values  [tokens, 2 · kv_heads · head_dim], K heads then V heads
        """
        stored = keys_values.to(self.dtype).contiguous().view(torch.int64)
        self._slots.index_copy_(0, slots, stored.view(slots.shape[0], -1))

    def run_index(self, tables: Tensor) -> Tensor:
        """What to gather for sequences: [layers, 2 · n · kv_heads · width] int64.

        tables  [n, width] int64 block ids
        """
        layout = self.layout
        block_runs = tables * (layout.kv_heads * layout.layers * 2)
        keys = block_runs[:, None, :] + self._head_runs[:, None]  # [n, kv_heads, width]
        first_layer = torch.stack((keys, keys + 1)).view(1, -1)
        return first_layer + self._layer_runs[:, None]

    def gather(self, runs: Tensor, num_sequences: int) -> tuple[Tensor, Tensor]:
        """One layer's K and V of some sequences, in the pool's dtype.

        runs     one row of `run_index`
        returns  K, V, each [num_sequences · kv_heads, width · block_size, head_dim]
        """
        layout = self.layout
        words = self._runs.index_select(0, runs)
        shape = (2, num_sequences * layout.kv_heads, -1, layout.head_dim)
        keys, values = words.view(self.dtype).view(shape)
        return keys, values
