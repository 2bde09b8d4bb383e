"""Attention over the paged pool of a device: what a step needs of kernels, and the kernels that torch has everywhere.

A kernel reads K and V where they lie, block by block; nothing that nobody wrote has a part in a result, so blocks
needn't be zeroed. The rows of a step are single tokens first, then chunks (`step_tables`).
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from pdserve.engine.attention import Heads, Span, Turn
from pdserve.engine.device.device_pool import DevicePool
from pdserve.engine.device.step_tables import StepTables

_CHUNK_QUERIES = 256  # that share one product; a key behind the last of them is not computed


class PagedKernels(Protocol):
    """Three kernels on one pool. They launch and never wait; `attend_singles` can be captured.

    A kernel gives queries and takes results as [tokens, heads, head_dim] in the dtype of the activations.
    """

    @property
    def name(self) -> str: ...

    def store(self, layer: int, projected: Tensor, turn: Turn, slots: Tensor) -> Tensor:
        """Turn queries and keys, write K and V to their slots [tokens]; gives the turned queries."""
        ...

    def attend_singles(
        self, layer: int, queries: Tensor, blocks: Tensor, ends: Tensor, outputs: Tensor
    ) -> None:
        """Rows of one token: [rows] queries see positions [0, end) of blocks [rows, width], or the window of them."""
        ...

    def attend_chunk(self, layer: int, queries: Tensor, blocks: Tensor, start: int, outputs: Tensor) -> None:
        """One row of several tokens at positions start, start + 1, …; blocks [width] cover them."""
        ...


class PagedAttention:
    """Implements `StepAttention` for one step."""

    def __init__(
        self, kernels: PagedKernels, tables: StepTables, num_single: int, chunks: list[tuple[int, Span]]
    ) -> None:
        """num_single: rows of one token, those to spare among them; chunks: the other rows, by their number."""
        self._kernels = kernels
        self._tables = tables
        self._num_single = num_single
        self._chunks = chunks

    def attend(self, layer: int, projected: Tensor, turn: Turn) -> Tensor:
        tables, single = self._tables, self._num_single
        queries = self._kernels.store(layer, projected, turn, tables.slots)
        outputs = torch.empty_like(queries)
        if single:
            self._kernels.attend_singles(
                layer, queries[:single], tables.blocks[:single], tables.ends[:single], outputs[:single]
            )
        for row, span in self._chunks:
            here = span.rows
            self._kernels.attend_chunk(layer, queries[here], tables.blocks[row], span.start, outputs[here])
        return outputs.flatten(1)


class GatheredKernels:
    """Implements `PagedKernels` in torch, on any device: K and V are gathered, products and sums are float32."""

    name = "gathered"

    def __init__(self, pool: DevicePool, heads: Heads) -> None:
        self._pool = pool
        self._heads = heads
        self._slots = pool.indexed.permute(
            0, 4, 2, 3, 1, 5
        )  # [blocks, offsets, layers, 2, kv_heads, head_dim]

    def store(self, layer: int, projected: Tensor, turn: Turn, slots: Tensor) -> Tensor:
        heads, size = self._heads, self._pool.layout.block_size
        rows = turn.of(projected)
        keys_values = rows[:, heads.query_width :].view(len(rows), 2, heads.num_kv_heads, heads.head_dim)
        places = slots.to(torch.int64)
        here = (torch.div(places, size, rounding_mode="floor"), places % size)
        if self._pool.limit:
            keys_values = keys_values.clamp(-self._pool.limit, self._pool.limit)
        stored = keys_values.to(self._pool.tensor.dtype).view(self._slots.dtype)
        self._slots[:, :, layer].index_put_(here, stored)
        return rows[:, : heads.query_width].to(projected.dtype).view(len(rows), -1, heads.head_dim)

    def attend_singles(
        self, layer: int, queries: Tensor, blocks: Tensor, ends: Tensor, outputs: Tensor
    ) -> None:
        heads, window = self._heads, self._heads.window(layer)
        keys, values = self._gathered(layer, blocks)
        positions = torch.arange(keys.shape[2], device=keys.device)
        hidden = positions >= ends[:, None]
        if window:
            hidden |= positions < ends[:, None] - window
        # What nobody wrote may be NaN, which a weight of 0 doesn't stop.
        values.masked_fill_(hidden[:, None, :, None], 0.0)
        grouped = queries.view(len(queries), heads.num_kv_heads, heads.group_size, heads.head_dim)
        attended = self._attended(grouped, keys, values, hidden[:, None, None])
        outputs.copy_(attended.reshape(outputs.shape))

    def attend_chunk(self, layer: int, queries: Tensor, blocks: Tensor, start: int, outputs: Tensor) -> None:
        heads, window = self._heads, self._heads.window(layer)
        end = start + len(queries)
        width = -(-end // self._pool.layout.block_size)
        keys, values = self._gathered(layer, blocks[None, :width])
        for begin in range(0, len(queries), _CHUNK_QUERIES):
            tile = queries[begin : begin + _CHUNK_QUERIES]
            last = start + begin + len(tile)
            positions = torch.arange(start + begin, last, device=keys.device)[:, None]
            seen = torch.arange(last, device=keys.device)
            hidden = seen > positions
            if window:
                hidden |= seen <= positions - window
            grouped = tile.view(len(tile), heads.num_kv_heads, heads.group_size, heads.head_dim)
            attended = self._attended(
                grouped.permute(1, 2, 0, 3), keys[0, :, None, :last], values[0, :, None, :last], hidden
            )
            outputs[begin : begin + len(tile)] = attended.permute(2, 0, 1, 3).reshape(tile.shape)

    def _gathered(self, layer: int, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """[rows, kv_heads, positions, head_dim] float32, of blocks [rows, width]."""
        layout = self._pool.layout
        found = (
            self._pool.indexed[:, :, layer].index_select(0, blocks.reshape(-1)).view(self._pool.tensor.dtype)
        )
        shaped = found.view(*blocks.shape, *found.shape[1:]).permute(3, 0, 2, 1, 4, 5)
        keys, values = shaped.to(torch.float32).reshape(2, len(blocks), layout.kv_heads, -1, layout.head_dim)
        return keys, values

    def _attended(self, queries: Tensor, keys: Tensor, values: Tensor, hidden: Tensor) -> Tensor:
        """queries […, n, head_dim], keys and values […, positions, head_dim]; hidden: which of them are not seen."""
        scores = (queries.to(torch.float32) @ keys.transpose(-1, -2)).mul_(self._heads.scale)
        if self._heads.softcap:
            scores.div_(self._heads.softcap).tanh_().mul_(self._heads.softcap)
        return torch.softmax(scores.masked_fill_(hidden, float("-inf")), dim=-1) @ values
