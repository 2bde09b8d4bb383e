"""Paged attention by torch's own kernels, `torch.nn.attention.varlen`, which read the pool by block tables, too."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from pdserve.engine.attention import Heads, Turn
from pdserve.engine.device.device_pool import DevicePool
from pdserve.engine.device.paged_attention import PagedKernels
from pdserve.engine.layout import KvLayout

_BLOCK_MULTIPLE = 256  # of positions; fewer are refused by the flash attention that torch brings
_MOST_DIM = 256


class VarlenAttend(Protocol):
    """`varlen_attn` as it is called here. query [tokens, heads, D], key and value [blocks, positions, kv_heads, D]."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seq_q: Tensor,
        cu_seq_k: None,
        max_q: int,
        max_k: int,
        *,
        scale: float,
        window_size: tuple[int, int],
        enable_gqa: bool,
        seqused_k: Tensor,
        block_table: Tensor,
    ) -> Tensor: ...


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

    return varlen_attn  # type: ignore[return-value]


class VarlenKernels:
    """Implements `PagedKernels`. It can't write to the pool: `store` is another one's."""

    name = "varlen"

    def __init__(self, pool: DevicePool, heads: Heads, storing: PagedKernels, attend: VarlenAttend) -> None:
        self._pool = pool
        self._heads = heads
        self._storing = storing
        self._attend = attend

    def store(self, layer: int, projected: Tensor, turn: Turn, slots: Tensor) -> Tensor:
        return self._storing.store(layer, projected, turn, slots)

    def attend_singles(
        self, layer: int, queries: Tensor, blocks: Tensor, ends: Tensor, outputs: Tensor
    ) -> None:
        firsts = torch.arange(len(queries) + 1, dtype=torch.int32, device=queries.device)
        self._call(layer, queries, firsts, 1, blocks, ends, outputs)

    def attend_chunk(self, layer: int, queries: Tensor, blocks: Tensor, start: int, outputs: Tensor) -> None:
        length = len(queries)
        firsts = torch.arange(0, 2 * length, length, dtype=torch.int32, device=queries.device)
        end = torch.full((1,), start + length, dtype=torch.int32, device=queries.device)
        self._call(layer, queries, firsts, length, blocks[None], end, outputs)

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
