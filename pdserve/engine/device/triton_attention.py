"""Paged attention by the kernels of `triton_kernels`: how they are launched."""

from __future__ import annotations

import torch
from torch import Tensor

from pdserve.engine.attention import Heads, Turn
from pdserve.engine.device import triton_kernels
from pdserve.engine.device.device_pool import DevicePool

_KEYS = 64  # of a tile
_QUERIES = 64  # of a tile of a chunk: query heads times positions
_LEAST_TILE = 16  # what tensor cores multiply at least
_MAX_PARTS = 32


class TritonKernels:
    """Implements `PagedKernels`. On a CPU only with TRITON_INTERPRET=1, for tests."""

    name = "triton"

    def __init__(self, pool: DevicePool, heads: Heads, num_processors: int) -> None:
        """num_processors: of the device; a few rows of long contexts are cut into parts for all of them."""
        self._pool = pool
        self._heads = heads
        self._num_processors = num_processors
        self._no_norm = torch.zeros(1, device=pool.tensor.device)

    def store(self, layer: int, projected: Tensor, turn: Turn, slots: Tensor) -> Tensor:
        heads = self._heads
        num_tokens, num_heads = len(projected), heads.query_width // heads.head_dim
        queries = projected.new_empty(num_tokens, num_heads, heads.head_dim)
        block_stride, head_stride, _, part_stride, *_ = self._pool.tensor.stride()
        triton_kernels.store_turned[(num_tokens, num_heads + 2 * heads.num_kv_heads)](
            projected,
            torch.view_as_real(turn.turns),
            self._no_norm if turn.norm is None else turn.norm.weight,
            slots,
            queries,
            self._pool.tensor[:, :, layer],
            0.0 if turn.norm is None else turn.norm.eps,
            projected.stride(0),
            block_stride,
            head_stride,
            part_stride,
            num_heads=num_heads,
            num_kv_heads=heads.num_kv_heads,
            D=heads.head_dim,
            half=_power_of_two(heads.head_dim // 2),
            block_size=self._pool.layout.block_size,
            has_norm=turn.norm is not None,
            limit=self._pool.limit,
        )
        return queries

    def attend_singles(
        self, layer: int, queries: Tensor, blocks: Tensor, ends: Tensor, outputs: Tensor
    ) -> None:
        num_rows, num_heads, size = queries.shape
        parts = self._parts(num_rows)
        sums = torch.empty(num_rows, num_heads, parts, size, device=queries.device)
        largest, weights = torch.empty(2, num_rows, num_heads, parts, device=queries.device)
        padded = max(_LEAST_TILE, _power_of_two(size))
        triton_kernels.attend_singles[(num_rows, self._heads.num_kv_heads, parts)](
            queries,
            blocks,
            ends,
            self._pool.tensor[:, :, layer],
            sums,
            largest,
            weights,
            blocks.stride(0),
            *self._common(layer),
            num_heads=num_heads,
            group=self._heads.group_size,
            D=size,
            padded=padded,
            block_size=self._pool.layout.block_size,
            M=max(_LEAST_TILE, _power_of_two(self._heads.group_size)),
            N=_KEYS,
            num_parts=parts,
            has_cap=bool(self._heads.softcap),
        )
        triton_kernels.join_parts[(num_rows * num_heads,)](
            sums, largest, weights, outputs, D=size, padded=padded, num_parts=parts
        )

    def attend_chunk(self, layer: int, queries: Tensor, blocks: Tensor, start: int, outputs: Tensor) -> None:
        num_tokens, num_heads, size = queries.shape
        num_tiles = -(-num_tokens * self._heads.group_size // _QUERIES)
        triton_kernels.attend_chunk[(num_tiles, self._heads.num_kv_heads)](
            queries,
            blocks,
            self._pool.tensor[:, :, layer],
            outputs,
            num_tokens,
            start,
            *self._common(layer),
            num_heads=num_heads,
            group=self._heads.group_size,
            D=size,
            padded=max(_LEAST_TILE, _power_of_two(size)),
            block_size=self._pool.layout.block_size,
            M=_QUERIES,
            N=_KEYS,
            has_cap=bool(self._heads.softcap),
        )

    def _common(self, layer: int) -> tuple[int, int, int, float, float, int]:
        block_stride, head_stride, _, part_stride, *_ = self._pool.tensor.stride()
        heads = self._heads
        return block_stride, head_stride, part_stride, heads.scale, heads.softcap, heads.window(layer)

    def _parts(self, num_rows: int) -> int:
        """How many programs share a row and KV head: two for each processor in all. A power of two."""
        programs = num_rows * self._heads.num_kv_heads
        return min(_MAX_PARTS, _power_of_two(max(1, 2 * self._num_processors // programs)))


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()
