"""Paged attention by torch's own kernels, `torch.nn.attention.varlen`, which read the pool by block tables, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from pdserve.engine.attention import Heads, Turn
from pdserve.engine.device.device_pool import DevicePool
from pdserve.engine.device.paged_attention import PagedKernels
from pdserve.engine.layout import KvLayout

_BLOCK_MULTIPLE = 256  # of positions; fewer are refused by the flash attention that torch brings
_MOST_DIM = 256
_MOST_CHUNKS = 64  # whose places are kept


VarlenAttend = Callable[..., Tensor]
"""`varlen_attn`, by its arguments: query [tokens, heads, D], key and value [blocks, positions, kv_heads, D]."""


def varlen_attend(layout: KvLayout, heads: Heads, compute: torch.dtype) -> VarlenAttend | None:
    """torch's function, if it has what a model needs: 16 bits, blocks of a multiple of 256 positions, no soft cap."""
    fits = (
        str(compute).removeprefix("torch.") == layout.dtype
        and compute.itemsize == 2
        and layout.block_size % _BLOCK_MULTIPLE == 0
        and heads.head_dim <= _MOST_DIM
        and heads.head_dim % 8 == 0
        and not heads.softcap
    )
    if not fits:
        return None
    from torch.nn.attention.varlen import varlen_attn

    return cast(VarlenAttend, varlen_attn)


class VarlenKernels:
    """Implements `PagedKernels`. It can't write to the pool: `store` is another one's."""

    name = "varlen"

    def __init__(self, pool: DevicePool, heads: Heads, storing: PagedKernels, attend: VarlenAttend) -> None:
        self._pool = pool
        self._heads = heads
        self._storing = storing
        self._attend = attend
        self._singles = torch.zeros(0, dtype=torch.int32)
        self._chunks: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def store(self, layer: int, projected: Tensor, turn: Turn, slots: Tensor) -> Tensor:
        return self._storing.store(layer, projected, turn, slots)

    def attend_singles(
        self, layer: int, queries: Tensor, blocks: Tensor, ends: Tensor, outputs: Tensor
    ) -> None:
        self._call(layer, queries, self._firsts_of_singles(len(queries)), 1, blocks, ends, outputs)

    def attend_chunk(self, layer: int, queries: Tensor, blocks: Tensor, start: int, outputs: Tensor) -> None:
        length = len(queries)
        firsts, end = self._place_of_chunk(start, length)
        self._call(layer, queries, firsts, length, blocks[None], end, outputs)

    def _firsts_of_singles(self, num_rows: int) -> Tensor:
        """[num_rows + 1]: made for the most rows yet, which a graph's trial run does before it is recorded."""
        if len(self._singles) <= num_rows:
            self._singles = torch.arange(num_rows + 1, dtype=torch.int32, device=self._pool.tensor.device)
        return self._singles[: num_rows + 1]

    def _place_of_chunk(self, start: int, length: int) -> tuple[Tensor, Tensor]:
        """Its first token and the one behind its last; where its keys end. All layers of a step ask for the same."""
        if (start, length) not in self._chunks:
            if len(self._chunks) == _MOST_CHUNKS:
                self._chunks.clear()
            numbers = torch.tensor(
                [0, length, start + length], dtype=torch.int32, device=self._pool.tensor.device
            )
            self._chunks[start, length] = numbers[:2], numbers[2:]
        return self._chunks[start, length]

    def _call(
        self,
        layer: int,
        queries: Tensor,
        firsts: Tensor,
        longest: int,
        blocks: Tensor,
        ends: Tensor,
        outputs: Tensor,
    ) -> None:
        """Causal from the end: the last query of a row sees all of [0, end), or the window before it."""
        keys, values = self._pool.tensor[:, :, layer].permute(2, 0, 3, 1, 4)
        window = self._heads.window(layer)
        outputs.copy_(
            self._attend(
                queries,
                keys,
                values,
                firsts,
                None,
                longest,
                blocks.shape[1] * self._pool.layout.block_size,
                scale=self._heads.scale,
                window_size=(window - 1 if window else -1, 0),
                enable_gqa=self._heads.group_size > 1,
                seqused_k=ends,
                block_table=blocks,
            )
        )
