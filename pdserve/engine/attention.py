"""Attention of one step over the paged pool: single-token rows together, longer chunks one by one.

The query heads that share a KV head are folded into rows of one small matrix, so K and V are read once a group.
Scores and sums are float32. Results depend in their last bits on who shares the step; `tiled_attention` is the form
that doesn't.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from pdserve.engine.kv_pool import KvPool

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


class StepAttention(Protocol):
    """Attention of one step, the same for all layers."""

    def attend(self, layer: int, qkv: Tensor) -> Tensor:
        """Store this layer's K and V of the step's tokens, then attend.

        qkv      [tokens, (heads + 2 · kv_heads) · head_dim] float32, queries and keys rotated; rows behind the last
                 span's are padding
        returns  [tokens, heads · head_dim] float32, zero in padding rows
        """
        ...


class Heads:
    """Sizes that all attention needs, and the views that they give."""

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        self.num_kv_heads = num_kv_heads
        self.group_size = num_heads // num_kv_heads
        self.head_dim = head_dim
        self.query_width = num_heads * head_dim
        self.scale = head_dim**-0.5

    def queries(self, qkv: Tensor) -> Tensor:
        """[tokens, kv_heads, group, head_dim] view of the queries."""
        return qkv[:, : self.query_width].view(-1, self.num_kv_heads, self.group_size, self.head_dim)

    def grouped(self, outputs: Tensor) -> Tensor:
        """The same view of attention's outputs."""
        return outputs.view(-1, self.num_kv_heads, self.group_size, self.head_dim)


class KvWriter:
    """Stores the new K and V of a step's tokens, layer by layer."""

    def __init__(self, pool: KvPool, spans: Sequence[Span], heads: Heads) -> None:
        size = pool.layout.block_size
        blocks: list[int] = []
        offsets: list[int] = []
        for span in spans:
            positions = range(span.start, span.end)
            blocks.extend(span.block_table[position // size] for position in positions)
            offsets.extend(position % size for position in positions)
        self._pool = pool
        self._slots = pool.slot_index(torch.tensor(blocks), torch.tensor(offsets)).unbind(0)
        self._num_tokens = len(blocks)
        self._query_width = heads.query_width

    def write(self, layer: int, qkv: Tensor) -> None:
        self._pool.write(self._slots[layer], qkv[: self._num_tokens, self._query_width :])


class BatchedAttention:
    """The fast form: as few kernels as the step's rows allow.

    spans    single-token rows first, ordered by `end`; then chunks
    compute  dtype in which chunks multiply: bfloat16 where the CPU does that faster
    """

    def __init__(self, pool: KvPool, spans: Sequence[Span], heads: Heads, compute: torch.dtype) -> None:
        self._writer = KvWriter(pool, spans, heads)
        self._heads = heads
        num_single = sum(1 for span in spans if span.length == 1)
        self._parts: list[_DecodeGroup | _Chunk] = [
            _DecodeGroup(pool, group, heads) for group in _groups(spans[:num_single])
        ]
        self._parts += [_Chunk(pool, span, heads, compute) for span in spans[num_single:]]

    def attend(self, layer: int, qkv: Tensor) -> Tensor:
        self._writer.write(layer, qkv)
        outputs = torch.zeros(qkv.shape[0], self._heads.query_width)
        for part in self._parts:
            part.attend(layer, qkv, outputs)
        return outputs


def _groups(spans: Sequence[Span]) -> list[list[Span]]:
    """Cut ordered single-token rows where padding, or the gathered amount, would become too much."""
    groups: list[list[Span]] = []
    for span in spans:
        group = groups[-1] if groups else []
        fits = (
            group
            and span.end <= group[0].end * _GROUP_SPREAD + 16
            and span.end * (len(group) + 1) <= _GROUP_TOKENS
        )
        if fits:
            group.append(span)
        else:
            groups.append([span])
    return groups


class _DecodeGroup:
    """Single-token rows of about equal length: three matrix kernels for all."""

    def __init__(self, pool: KvPool, spans: list[Span], heads: Heads) -> None:
        size = pool.layout.block_size
        width = -(-spans[-1].end // size)
        # Padding repeats a block of the same sequence: a foreign one might hold anything, a NaN too.
        tables = [[*span.block_table[: -(-span.end // size)]] for span in spans]
        padded = [table + table[:1] * (width - len(table)) for table in tables]
        ends = torch.tensor([span.end for span in spans])
        hidden = torch.arange(width * size) >= ends[:, None]
        mask = torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf"))
        self._mask = mask[:, None, None].expand(-1, heads.num_kv_heads, 1, -1).reshape(-1, 1, width * size)
        self._runs = pool.run_index(torch.tensor(padded)).unbind(0)
        self._pool = pool
        self._heads = heads
        self._count = len(spans)
        self._rows = slice(spans[0].first, spans[0].first + len(spans))

    def attend(self, layer: int, qkv: Tensor, outputs: Tensor) -> None:
        heads = self._heads
        keys, values = self._pool.gather(self._runs[layer], self._count)
        keys, values = keys.to(torch.float32), values.to(torch.float32)
        queries = heads.queries(qkv[self._rows]).reshape(-1, heads.group_size, heads.head_dim)
        scores = torch.baddbmm(self._mask, queries, keys.transpose(1, 2), alpha=heads.scale)
        target = outputs[self._rows].view(-1, heads.group_size, heads.head_dim)
        torch.bmm(torch.softmax(scores, dim=-1), values, out=target)


class _Chunk:
    """One row of several tokens: PyTorch's blockwise attention over its gathered context."""

    def __init__(self, pool: KvPool, span: Span, heads: Heads, compute: torch.dtype) -> None:
        size = pool.layout.block_size
        width = -(-span.end // size)
        self._runs = pool.run_index(torch.tensor([span.block_table[:width]])).unbind(0)
        self._pool = pool
        self._heads = heads
        self._compute = compute
        self._rows = slice(span.first, span.first + span.length)
        self._tiles: list[tuple[slice, int, Tensor]] = []
        for begin in range(0, span.length, _CHUNK_QUERIES):
            stop = min(begin + _CHUNK_QUERIES, span.length)
            num_keys = span.start + stop
            positions = torch.arange(span.start + begin, span.start + stop)
            hidden = torch.arange(num_keys) > positions[:, None]
            mask = torch.zeros(hidden.shape, dtype=compute).masked_fill_(hidden, float("-inf"))
            self._tiles.append((slice(begin, stop), num_keys, mask))

    def attend(self, layer: int, qkv: Tensor, outputs: Tensor) -> None:
        heads = self._heads
        keys, values = self._pool.gather(self._runs[layer], 1)
        # A stride of 0 shares each KV head among its group of query heads without a copy.
        keys = keys.to(self._compute)[:, None].expand(-1, heads.group_size, -1, -1)
        values = values.to(self._compute)[:, None].expand(-1, heads.group_size, -1, -1)
        queries = heads.queries(qkv[self._rows]).to(self._compute).permute(1, 2, 0, 3)
        target = heads.grouped(outputs[self._rows]).permute(1, 2, 0, 3)
        for rows, num_keys, mask in self._tiles:
            attended = functional.scaled_dot_product_attention(
                queries[:, :, rows],
                keys[:, :, :num_keys],
                values[:, :, :num_keys],
                attn_mask=mask.expand(*queries.shape[:2], -1, -1),
                scale=heads.scale,
            )
            target[:, :, rows].copy_(attended)
