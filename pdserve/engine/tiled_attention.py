"""Attention whose result for a position is the same bits whoever shares the step and however the prompt was cut.

    positions   0 … 15 │ 16 … 31 │ 32 … 47        tiles lie at absolute positions, one block each;
    a chunk          12┆─┤────────┼────┤40         a tile is computed whole: rows that are not in this
    its tiles   [······▓▓▓▓][▓▓▓▓▓▓▓▓][▓▓▓▓░░░░]   step are zero queries, keys behind the end are zero

So every position meets kernels of one shape: kv_heads × (group · 16) queries × as many keys as there are from the first
block that the tile's first position sees to the tile's end. The pool's own zeros are the padding of the keys
(`KvPool.begin_blocks`). Costs some times more than `attention` in decode.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pdserve.engine.attention import Heads, Span, Turn, first_block, writer_of
from pdserve.engine.kv_pool import KvPool, KvReader


class TiledAttention:
    """Attention of one step in tiles of `block_size` positions; rows may come in any order."""

    def __init__(self, pool: KvPool, spans: Sequence[Span], heads: Heads, num_rows: int) -> None:
        """num_rows: tokens, and rows behind them that stay zero."""
        self._spans = spans
        self._heads = heads
        self._writer = writer_of(pool, spans)
        self._num_tokens = sum(span.length for span in spans)
        self._outputs = torch.zeros(num_rows, heads.query_width)
        self._tiled = {window: _Tiled(pool, spans, heads, window) for window in heads.kinds}

    def attend(self, layer: int, projected: Tensor, turn: Turn) -> Tensor:
        """Zero in rows behind the last span's."""
        qkv = turn.of(projected)
        self._writer.write(layer, qkv[: self._num_tokens, self._heads.query_width :])
        tiled = self._tiled[self._heads.window(layer)]
        for index, span in enumerate(self._spans):
            queries = self._heads.grouped(qkv[span.rows]).permute(1, 2, 0, 3)
            target = self._heads.grouped(self._outputs[span.rows]).permute(1, 2, 0, 3)
            tiled.attend_span(layer, index, queries, target)
        return self._outputs


class _Tiled:
    """What layers with one window share."""

    def __init__(self, pool: KvPool, spans: Sequence[Span], heads: Heads, window: int) -> None:
        size = pool.layout.block_size
        self._size = size
        self._spans = spans
        self._heads = heads
        self._window = window
        self._first = [first_block(span.start // size * size, window, size) for span in spans]
        self._readers = [
            KvReader(pool, [span.blocks(size)[first:]], torch.float32)
            for span, first in zip(spans, self._first, strict=True)
        ]
        # Of the keys that end with a tile's own; what lies before them is seen by all of its positions.
        num_before = -(-(window - 1) // size) if window else 0
        queries, keys = torch.arange(size)[:, None], torch.arange(-num_before * size, size)
        self._mask = torch.zeros(size, len(keys)).masked_fill_(keys > queries, float("-inf"))
        if window:
            self._mask.masked_fill_(keys <= queries - window, float("-inf"))

    def attend_span(self, layer: int, index: int, queries: Tensor, target: Tensor) -> None:
        """queries, target [kv_heads, group, length, head_dim] of the index-th span."""
        size, span = self._size, self._spans[index]
        reader, begin = self._readers[index], self._first[index] * size
        reader.load(layer)
        for tile in range(span.start // size, -(-span.end // size)):
            first = max(tile * size, span.start)
            last = min((tile + 1) * size, span.end)
            here = slice(first - span.start, last - span.start)
            inside = slice(first - tile * size, last - tile * size)
            padded = torch.zeros(*queries.shape[:2], size, queries.shape[3])
            padded[:, :, inside] = queries[:, :, here]
            first_key = first_block(tile * size, self._window, size) * size
            seen = slice(first_key - begin, (tile + 1) * size - begin)
            attended = self._attend_tile(padded, reader.keys[:, seen], reader.values[:, seen])
            target[:, :, here] = attended[:, :, inside]

    def _attend_tile(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        rows = queries.flatten(1, 2)
        if self._heads.softcap:
            scores = self._heads.capped_(torch.bmm(rows, keys.transpose(1, 2)))
        else:
            scores = torch.bmm(rows.mul_(self._heads.scale), keys.transpose(1, 2))
        masked = min(self._mask.shape[1], keys.shape[1])
        scores.view(*queries.shape[:3], -1)[..., -masked:].add_(self._mask[:, -masked:])
        return torch.bmm(torch.softmax(scores, dim=-1), values).view(queries.shape)
