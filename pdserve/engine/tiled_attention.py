"""Attention whose result for a position is the same bits whoever shares the step and however the prompt was cut.

    positions   0 … 15 │ 16 … 31 │ 32 … 47        tiles lie at absolute positions, one block each;
    a chunk          12┆─┤────────┼────┤40         a tile is computed whole: rows that are not in this
    its tiles   [······▓▓▓▓][▓▓▓▓▓▓▓▓][▓▓▓▓░░░░]   step are zero queries, keys behind the end are zero

So every position meets kernels of one shape: kv_heads × (group · 16) queries × (tile + 1) · 16 keys. The pool's own
zeros are the padding of the keys (`KvPool.begin_blocks`). Costs some times more than `attention` in decode.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pdserve.engine.attention import Heads, Span, writer_of
from pdserve.engine.kv_pool import KvPool, KvReader


class TiledAttention:
    """Attention of one step in tiles of `block_size` positions; rows may come in any order."""

    def __init__(self, pool: KvPool, spans: Sequence[Span], heads: Heads, num_rows: int) -> None:
        """num_rows: tokens with padding."""
        size = pool.layout.block_size
        self._size = size
        self._spans = spans
        self._heads = heads
        self._writer = writer_of(pool, spans)
        self._num_tokens = sum(span.length for span in spans)
        self._readers = [KvReader(pool, [span.blocks(size)], torch.float32) for span in spans]
        self._outputs = torch.zeros(num_rows, heads.query_width)
        later = torch.ones(size, size, dtype=torch.bool).triu(1)
        self._mask = torch.zeros(size, size).masked_fill_(later, float("-inf"))

    def attend(self, layer: int, qkv: Tensor) -> Tensor:
        self._writer.write(layer, qkv[: self._num_tokens, self._heads.query_width :])
        for span, reader in zip(self._spans, self._readers, strict=True):
            reader.load(layer)
            queries = self._heads.grouped(qkv[span.rows]).permute(1, 2, 0, 3)
            target = self._heads.grouped(self._outputs[span.rows]).permute(1, 2, 0, 3)
            self._attend_span(span, queries, reader.keys, reader.values, target)
        return self._outputs

    def _attend_span(self, span: Span, queries: Tensor, keys: Tensor, values: Tensor, target: Tensor) -> None:
        """queries, target [kv_heads, group, length, head_dim]; keys, values [kv_heads, whole tiles, head_dim]."""
        size = self._size
        for tile in range(span.start // size, -(-span.end // size)):
            first = max(tile * size, span.start)
            last = min((tile + 1) * size, span.end)
            here = slice(first - span.start, last - span.start)
            inside = slice(first - tile * size, last - tile * size)
            padded = torch.zeros(*queries.shape[:2], size, queries.shape[3])
            padded[:, :, inside] = queries[:, :, here]
            num_keys = (tile + 1) * size
            attended = self._attend_tile(padded, keys[:, :num_keys], values[:, :num_keys])
            target[:, :, here] = attended[:, :, inside]

    def _attend_tile(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        rows = queries.flatten(1, 2).mul_(self._heads.scale)
        scores = torch.bmm(rows, keys.transpose(1, 2))
        scores.view(*queries.shape[:3], -1)[..., -self._size :].add_(self._mask)
        return torch.bmm(torch.softmax(scores, dim=-1), values).view(queries.shape)
