"""The KV pool's bytes, and the one place that knows how blocks, heads and layers lie in them.

    [num_blocks, kv_heads, layers, 2, block_size, head_dim]
     └─ a block is one range of bytes, and so is any range of its heads: what the links move
                            └─ "run": K or V of one layer, head and block: what attention gathers
                                     └─ "slot": one position of a run: what a step writes

Copies go through int64 views: torch moves them at memory speed, 16-bit ones at a fraction of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pdserve.engine.layout import KvLayout
from pdserve.kv_memory import HostMemory

_WORDS = (torch.int64, torch.int32)  # what heads are copied by: the wider, the faster


class KvPool:
    """Owned by the engine; the transfer owner reads and writes single blocks through `memory`."""

    def __init__(
        self, layout: KvLayout, dtype: torch.dtype, make_memory: Callable[[int], HostMemory] = HostMemory
    ) -> None:
        self.layout = layout
        self.dtype = dtype
        self.memory = make_memory(layout.pool_bytes)
        self._bytes = torch.frombuffer(self.memory.bytes, dtype=torch.uint8)
        self._blocks = self._bytes.view(layout.num_blocks, layout.block_bytes)
        head_bytes = layout.head_dim * layout.item_bytes
        word = next(each for each in _WORDS if head_bytes % each.itemsize == 0)
        words = self._bytes.view(word)
        self.slots = words.view(-1, head_bytes // word.itemsize)
        self.runs = words.view(-1, layout.block_size * head_bytes // word.itemsize)
        #: [num_blocks, kv_heads, layers, 2, block_size, head_dim]
        self.tensor = self._bytes.view(dtype).view(
            layout.num_blocks, layout.kv_heads, layout.layers, 2, layout.block_size, layout.head_dim
        )
        self._head_runs = torch.arange(layout.kv_heads) * (layout.layers * 2)
        self._head_slots = (torch.arange(2)[:, None] + self._head_runs) * layout.block_size
        self._layer_runs = torch.arange(layout.layers)[:, None] * 2
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def prepare(self, block_ids: Sequence[int]) -> None:
        """These blocks, at least one, are about to be written: their memory may have to be made ready."""
        self.memory.prepare((max(block_ids) + 1) * self.layout.block_bytes)

    def begin_blocks(self, block_ids: Sequence[int]) -> None:
        """Zero blocks that a sequence starts to fill but won't fill in this step.

        Attention reads whole blocks and masks what lies behind a sequence's end; a masked NaN is still a NaN.
        """
        if block_ids:
            self.prepare(block_ids)
        for block_id in block_ids:
            self._blocks[block_id].zero_()

    def slot_index(self, block_ids: Tensor, offsets: Tensor) -> Tensor:
        """Where tokens go: [layers, tokens · 2 · kv_heads] int64, K heads then V heads of each token.

        block_ids, offsets  [tokens] int64
        """
        layout = self.layout
        block_runs = block_ids * (layout.kv_heads * layout.layers * 2)
        places = block_runs[:, None, None] * layout.block_size + offsets[:, None, None] + self._head_slots
        return places.view(1, -1) + self._layer_runs * layout.block_size

    def run_index(self, tables: Tensor) -> Tensor:
        """What to gather for sequences: [layers, 2 · n · kv_heads · width] int64.

        tables  [n, width] int64 block ids
        """
        layout = self.layout
        block_runs = tables * (layout.kv_heads * layout.layers * 2)
        keys = block_runs[:, None, :] + self._head_runs[:, None]  # [n, kv_heads, width]
        return torch.stack((keys, keys + 1)).view(1, -1) + self._layer_runs

    def scratch(self, num_bytes: int) -> Tensor:
        """Memory that each layer and step uses again, so that it stays in the CPU's cache: [num_bytes] uint8."""
        if self._scratch.numel() < num_bytes:
            self._scratch = torch.empty(num_bytes, dtype=torch.uint8)
        return self._scratch[:num_bytes]


class KvWriter:
    """Stores the new K and V of a step's tokens, layer by layer."""

    def __init__(self, pool: KvPool, block_ids: Sequence[int], offsets: Sequence[int]) -> None:
        """block_ids, offsets: where each token of the step goes."""
        pool.prepare(block_ids)
        layout = pool.layout
        self._slots = pool.slots
        self._single: tuple[Tensor, ...] = ()
        if len(block_ids) == 1:
            place = pool.tensor[block_ids[0], :, :, :, offsets[0]]  # [kv_heads, layers, 2, head_dim]
            self._single = place.permute(1, 2, 0, 3).unbind(0)
            return
        self._places = pool.slot_index(torch.tensor(block_ids), torch.tensor(offsets)).unbind(0)
        self._staged = torch.empty(len(block_ids), 2 * layout.kv_heads * layout.head_dim, dtype=pool.dtype)
        self._words = self._staged.view(pool.slots.dtype).view(-1, self._slots.shape[1])

    def write(self, layer: int, keys_values: Tensor) -> None:
        """keys_values  [tokens, 2 · kv_heads · head_dim], K heads then V heads"""
        if self._single:
            place = self._single[layer]
            place.copy_(keys_values.view(place.shape))
            return
        self._staged.copy_(keys_values)
        self._slots.index_copy_(0, self._places[layer], self._words)


class KvReader:
    """Gathers K and V of some sequences, one layer at a time, into memory that all readers of a pool share.

    One sequence whose blocks lie in a row in the pool, as those of a fresh one mostly do, is read without a gather.
    """

    def __init__(self, pool: KvPool, tables: Sequence[Sequence[int]], dtype: torch.dtype) -> None:
        """tables: block ids of each sequence, all of one length; dtype: of what is read."""
        layout = pool.layout
        self._row = _as_row(pool, tables)
        num_values = sum(map(len, tables)) * layout.kv_heads * 2 * layout.block_size * layout.head_dim
        stored_bytes = num_values * layout.item_bytes
        scratch = pool.scratch(stored_bytes + num_values * dtype.itemsize)
        self._stored = scratch[:stored_bytes].view(pool.dtype)
        self._read = self._stored if dtype is pool.dtype else scratch[stored_bytes:].view(dtype)
        shape = (2, len(tables) * layout.kv_heads, -1, layout.head_dim)
        #: [sequences · kv_heads, width · block_size, head_dim]: of the layer that was loaded last by any reader
        self.keys, self.values = self._read.view(shape)
        if self._row:
            self._read = self._read.view(self._row[0].shape)
            return
        self._runs = pool.runs
        self._index = pool.run_index(torch.tensor(tables)).unbind(0)
        self._words = scratch[:stored_bytes].view(pool.runs.dtype).view(-1, self._runs.shape[1])

    def load(self, layer: int) -> None:
        if self._row:
            self._read.copy_(self._row[layer])
            return
        torch.index_select(self._runs, 0, self._index[layer], out=self._words)
        if self._read is not self._stored:
            self._read.copy_(self._stored)


def _as_row(pool: KvPool, tables: Sequence[Sequence[int]]) -> tuple[Tensor, ...]:
    """For each layer [2, kv_heads, width, block_size, head_dim], in place; () if the blocks don't lie in a row."""
    table = tables[0]
    if len(tables) > 1 or any(block_id != table[0] + index for index, block_id in enumerate(table)):
        return ()
    blocks = pool.tensor[table[0] : table[0] + len(table)]
    return blocks.permute(2, 3, 1, 0, 4, 5).unbind(0)
