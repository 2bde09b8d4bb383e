"""Attention of one step over the paged pool: single-token rows together, longer chunks one by one.

The query heads that share a KV head are folded into rows of one small matrix, so K and V are read once a group. Layers
with a window gather only the blocks that hold what it shows. Scores and sums are float32. Results depend in their last
bits on who shares the step; `tiled_attention` is the form that doesn't.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from pdserve.engine.kv_pool import KvPool, KvReader, KvWriter
from pdserve.engine.layers import HeadNorm
from pdserve.engine.row_tiles import RowFunction

# Gathered K and V of a group should stay in the cache between the kernels that read them.
_GROUP_TOKENS = 4096
# A group pads its sequences to the longest; this much longer than the shortest is allowed.
_GROUP_SPREAD = 1.25
# Queries that share one call: a key behind the last of them is not computed.
_CHUNK_QUERIES = 256


@dataclass(frozen=True, slots=True)
class Span:
    """One row's place in a step: tokens [first, first + length) of the batch, positions start, start + 1, …."""

    first: int
    length: int
    start: int
    block_table: Sequence[int]

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def rows(self) -> slice:
        return slice(self.first, self.first + self.length)

    def blocks(self, block_size: int) -> Sequence[int]:
        """The blocks that hold its positions."""
        return self.block_table[: -(-self.end // block_size)]


class Turn(NamedTuple):  # not a dataclass: one is made for each layer of a step
    """What is still to be done to a layer's projection: heads are normalised, queries and keys turned.

    function  does both: (projection, turns) → float32, may overwrite the projection
    turns     [tokens, 1, head_dim/2] complex64
    norm      of queries and keys, where the family has one: what a kernel needs that does both itself
    """

    function: RowFunction
    turns: Tensor
    norm: HeadNorm | None

    def of(self, projected: Tensor) -> Tensor:
        """The projection as float32, queries and keys normalised and turned."""
        return self.function(projected, self.turns)


class StepAttention(Protocol):
    """Attention of one step, the same for all layers."""

    def attend(self, layer: int, projected: Tensor, turn: Turn) -> Tensor:
        """Turn queries and keys, store this layer's K and V of the step's tokens, then attend.

        projected  [tokens, (heads + 2 · kv_heads) · head_dim] in the dtype of the activations; there may be rows
                   behind the last span's
        returns    [tokens, heads · head_dim]; overwritten by the next call
        """
        ...


class Heads:
    """Sizes that all attention needs, and the views that they give."""

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        scale: float = 0.0,
        softcap: float = 0.0,
        windows: Sequence[int] = (),
    ) -> None:
        """What follows has the meaning that it has in `ModelConfig`.

        scale    0: head_dim^-½
        windows  of all layers, one by one; without it every layer sees all. `kinds` are the different ones
        """
        self.num_kv_heads = num_kv_heads
        self.group_size = num_heads // num_kv_heads
        self.head_dim = head_dim
        self.query_width = num_heads * head_dim
        self.scale = scale or head_dim**-0.5
        self.softcap = softcap
        self.kinds = sorted(set(windows)) or [0]
        self._windows = windows

    def window(self, layer: int) -> int:
        """0: the layer sees all."""
        return self._windows[layer] if self._windows else 0

    def grouped(self, rows: Tensor) -> Tensor:
        """[tokens, ≥ query width] as [tokens, kv_heads, group, head_dim]: a view of queries, or of outputs."""
        return rows[:, : self.query_width].view(-1, self.num_kv_heads, self.group_size, self.head_dim)

    def capped_(self, products: Tensor) -> Tensor:
        """Products of queries and keys as scores with a soft cap, in place."""
        return products.mul_(self.scale / self.softcap).tanh_().mul_(self.softcap)


def first_block(position: int, window: int, block_size: int) -> int:
    """The first block that holds something that a position sees."""
    return max(0, position + 1 - window) // block_size if window else 0


def begun_blocks(spans: Sequence[Span], block_size: int) -> list[int]:
    """The blocks that a step begins and leaves partly unfilled: to be zeroed (`KvPool.begin_blocks`)."""
    return [
        span.block_table[span.end // block_size]
        for span in spans
        if span.end % block_size and span.end // block_size * block_size >= span.start
    ]


def writer_of(pool: KvPool, spans: Sequence[Span]) -> KvWriter:
    """Stores the K and V of all tokens of a step."""
    size = pool.layout.block_size
    places = [(span, position) for span in spans for position in range(span.start, span.end)]
    return KvWriter(
        pool,
        [span.block_table[position // size] for span, position in places],
        [position % size for _, position in places],
    )


class BatchedAttention:
    """The fast form: as few kernels as the step's rows allow."""

    def __init__(
        self, pool: KvPool, spans: Sequence[Span], heads: Heads, compute: torch.dtype, num_rows: int
    ) -> None:
        """What layers share is made here.

        spans     single-token rows first, ordered by `end`; then chunks
        num_rows  tokens, and rows behind them that stay zero
        compute   dtype in which chunks multiply: bfloat16 where the CPU does that faster
        """
        self._writer = writer_of(pool, spans)
        self._heads = heads
        self._num_tokens = sum(span.length for span in spans)
        self._outputs = torch.zeros(num_rows, heads.query_width)
        num_single = sum(1 for span in spans if span.length == 1)
        self._parts: dict[int, list[_DecodeGroup | _Chunk]] = {}
        for window in heads.kinds:
            groups = _groups(spans[:num_single], window, pool.layout.block_size)
            self._parts[window] = [
                *(_DecodeGroup(pool, group, heads, window, self._outputs) for group in groups),
                *(_Chunk(pool, span, heads, window, self._outputs, compute) for span in spans[num_single:]),
            ]

    def attend(self, layer: int, projected: Tensor, turn: Turn) -> Tensor:
        """Zero in rows behind the last span's."""
        qkv = turn.of(projected)
        self._writer.write(layer, qkv[: self._num_tokens, self._heads.query_width :])
        for part in self._parts[self._heads.window(layer)]:
            part.attend(layer, qkv)
        return self._outputs


def _groups(spans: Sequence[Span], window: int, block_size: int) -> list[list[Span]]:
    """Cut ordered single-token rows where padding, or the gathered amount, would become too much."""
    groups: list[list[Span]] = []
    shortest = longest = 0
    for span in spans:
        group = groups[-1] if groups else []
        length = span.end - first_block(span.start, window, block_size) * block_size
        longer = max(longest, length)
        if group and longer <= shortest * _GROUP_SPREAD + 16 and longer * (len(group) + 1) <= _GROUP_TOKENS:
            group.append(span)
            shortest, longest = min(shortest, length), longer
        else:
            groups.append([span])
            shortest = longest = length
    return groups


def _mask(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where a key is seen, −inf where it is hidden."""
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))


class _DecodeGroup:
    """Single-token rows of about equal length: three matrix kernels for all."""

    def __init__(self, pool: KvPool, spans: list[Span], heads: Heads, window: int, outputs: Tensor) -> None:
        size = pool.layout.block_size
        first = [first_block(span.start, window, size) for span in spans]
        tables = [[*span.blocks(size)[begin:]] for span, begin in zip(spans, first, strict=True)]
        width = max(len(table) for table in tables)
        # Padding repeats a block of the same sequence: a foreign one might hold anything, a NaN too.
        self._reader = KvReader(
            pool, [table + table[:1] * (width - len(table)) for table in tables], torch.float32
        )
        keys = torch.arange(width * size)
        ends = torch.tensor([span.end - begin * size for span, begin in zip(spans, first, strict=True)])[
            :, None
        ]
        hidden = keys >= ends
        if window:
            hidden |= keys < ends - window
        mask = _mask(hidden, torch.float32)[:, None].expand(-1, heads.num_kv_heads, -1)
        self._mask = mask.reshape(-1, 1, width * size)
        self._rows = slice(spans[0].first, spans[0].first + len(spans))
        self._heads = heads
        self._keys = self._reader.keys.transpose(1, 2)
        self._values = self._reader.values
        self._target = outputs[self._rows].view(-1, heads.group_size, heads.head_dim)

    def attend(self, layer: int, qkv: Tensor) -> None:
        self._reader.load(layer)
        queries = self._heads.grouped(qkv[self._rows]).reshape(self._target.shape)
        if self._heads.softcap:
            scores = self._heads.capped_(torch.bmm(queries, self._keys)).add_(self._mask)
        else:
            scores = torch.baddbmm(self._mask, queries, self._keys, alpha=self._heads.scale)
        torch.bmm(torch.softmax(scores, dim=-1), self._values, out=self._target)


class _Chunk:
    """One row of several tokens: PyTorch's blockwise attention over its gathered context."""

    def __init__(
        self, pool: KvPool, span: Span, heads: Heads, window: int, outputs: Tensor, compute: torch.dtype
    ) -> None:
        size = pool.layout.block_size
        first = first_block(span.start, window, size)
        self._reader = KvReader(pool, [span.blocks(size)[first:]], compute)
        self._heads = heads
        self._compute = compute
        self._rows = span.rows
        # [kv_heads, group, …]: a stride of 0 shares each KV head among its group of query heads without a copy.
        keys = self._reader.keys[:, None].expand(-1, heads.group_size, -1, -1)
        values = self._reader.values[:, None].expand(-1, heads.group_size, -1, -1)
        target = heads.grouped(outputs[span.rows]).permute(1, 2, 0, 3)
        self._tiles: list[_Tile] = []
        for begin in range(0, span.length, _CHUNK_QUERIES):
            rows = slice(begin, min(begin + _CHUNK_QUERIES, span.length))
            positions = torch.arange(span.start + begin, span.start + rows.stop)[:, None]
            first_key = first_block(span.start + begin, window, size) * size
            seen = torch.arange(first_key, span.start + rows.stop)
            hidden = seen > positions
            if window:
                hidden |= seen <= positions - window
            gathered = slice(first_key - first * size, span.start + rows.stop - first * size)
            self._tiles.append(
                _Tile(
                    rows,
                    keys[:, :, gathered],
                    values[:, :, gathered],
                    _mask(hidden, compute).expand(*target.shape[:2], -1, -1),
                    target[:, :, rows],
                )
            )

    def attend(self, layer: int, qkv: Tensor) -> None:
        self._reader.load(layer)
        queries = self._heads.grouped(qkv[self._rows]).to(self._compute).permute(1, 2, 0, 3)
        for tile in self._tiles:
            tile.target.copy_(self._attended(queries[:, :, tile.rows], tile))

    def _attended(self, queries: Tensor, tile: _Tile) -> Tensor:
        if not self._heads.softcap:
            return functional.scaled_dot_product_attention(
                queries, tile.keys, tile.values, attn_mask=tile.mask, scale=self._heads.scale
            )
        products = (queries @ tile.keys.transpose(-1, -2)).to(torch.float32)
        weights = torch.softmax(self._heads.capped_(products).add_(tile.mask), dim=-1)
        return weights.to(self._compute) @ tile.values


@dataclass(frozen=True, slots=True)
class _Tile:
    """Some queries of a chunk and what they see; tensors are [kv_heads, group, …] views that layers share."""

    rows: slice
    keys: Tensor
    values: Tensor
    mask: Tensor
    target: Tensor
