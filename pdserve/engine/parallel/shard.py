"""Which part of a model one of several ranks has: whole heads, whole columns of the feed-forward. No torch.

    heads  0 1 2 3 │ 4 5 6 7      4 KV heads, 2 ranks: divided            0 1 │ 2 3 │ 4 5 │ 6 7    2 KV heads, 4 ranks:
    KV     0   1   │ 2   3                                                  0 │   0 │   1 │   1    two ranks share each

A block of the KV pool is one range of bytes and so is any range of its heads. So where a block has `parts` such
ranges, block b's part p is itself a block, number b · parts + p, of a pool with fewer heads a block: that is how a rank
sees the pool that all ranks share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pdserve.engine.layout import KvLayout
from pdserve.engine.model_config import ModelConfig
from pdserve.modelstore.errors import BadModel

MOST_RANKS = 64


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank of `size`."""

    rank: int = 0
    size: int = 1

    def part(self, total: int) -> slice:
        """Its own of so many, which `size` divides."""
        each = total // self.size
        return slice(self.rank * each, (self.rank + 1) * each)

    def kv_part(self, num_kv_heads: int) -> KvPart:
        """Its KV heads: the one that its query heads need, where there are more ranks than KV heads."""
        parts = min(self.size, num_kv_heads)
        return KvPart(self.rank * parts // self.size, parts)

    def shares_heads(self, num_kv_heads: int) -> bool:
        """Whether other ranks write the same part of a block, too."""
        return self.size > num_kv_heads

    def config(self, whole: ModelConfig) -> ModelConfig:
        """The shape of its part. Raises BadModel: the model can't be divided so."""
        size = self.size
        if size == 1:
            return whole
        why = _indivisible(whole, size)
        if why:
            what, fields = why
            raise BadModel(f"{what} can't be divided among so many ranks", tensor_parallel=size, **fields)
        return replace(
            whole,
            num_heads=whole.num_heads // size,
            num_kv_heads=self.kv_part(whole.num_kv_heads).heads(whole.num_kv_heads),
            ffn_size=whole.ffn_size // size,
        )


@dataclass(frozen=True, slots=True)
class KvPart:
    """One of `parts` equal ranges of a block's heads."""

    index: int
    parts: int

    def heads(self, num_kv_heads: int) -> int:
        return num_kv_heads // self.parts

    def range(self, num_kv_heads: int) -> slice:
        """Of all KV heads."""
        each = self.heads(num_kv_heads)
        return slice(self.index * each, (self.index + 1) * each)

    def layout(self, whole: KvLayout) -> KvLayout:
        """Of the same bytes, as this part's pool."""
        return replace(whole, num_blocks=whole.num_blocks * self.parts, kv_heads=whole.kv_heads // self.parts)

    def table(self, block_ids: Sequence[int]) -> Sequence[int]:
        """The blocks of this part's pool that are its range of these blocks."""
        if self.parts == 1:
            return block_ids
        return [block_id * self.parts + self.index for block_id in block_ids]


WHOLE = KvPart(0, 1)


def possible_sizes(config: ModelConfig) -> list[int]:
    """The numbers of ranks that a model can be divided among."""
    return [size for size in range(1, MOST_RANKS + 1) if size == 1 or not _indivisible(config, size)]


def _indivisible(config: ModelConfig, size: int) -> tuple[str, dict[str, object]] | None:
    """What of a model can't be divided so, and how much there is of it."""
    if config.num_heads % size:
        return "the query heads", {"num_heads": config.num_heads}
    if config.num_kv_heads % size and size % config.num_kv_heads:
        return "the KV heads", {"num_kv_heads": config.num_kv_heads}
    experts = config.experts
    widths = [] if experts is not None and all(experts.layers) else [config.ffn_size]
    if experts is not None:
        widths.append(experts.ffn_size)
    for width in widths:
        if width % (2 * size):  # kernels take columns by twos
            return "the feed-forward's columns, by twos,", {"width": width}
    return None
