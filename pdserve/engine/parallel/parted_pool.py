"""The KV pool of ranks that have one each, on a device of their own, as links see it: one memory in the whole's layout.

    a block            [ heads 0 1 | heads 2 3 ]
    rank 0's pool        block, of 2 heads                      a part of a block is a block of its rank's pool
    rank 1's pool                     block, of 2 heads

Where there are more ranks than KV heads, several have the same part: what comes goes to each of them, and what leaves
comes from the first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pdserve.engine.layout import KvLayout
from pdserve.engine.parallel.shard import KvPart
from pdserve.errors import InvariantViolated
from pdserve.kv_memory import ByteSpan, KvMemory, UnseenMemory


class PartSpan(NamedTuple):
    """A run of bytes inside one rank's part of one block.

    offset  in the span that it is a piece of
    span    in the pool of each rank that has the part
    part    which one
    """

    offset: int
    span: ByteSpan
    part: int


class PartedPool(UnseenMemory):
    """Implements `KvMemory`: nothing sees it whole, its bytes are copied part by part (`pieces`)."""

    def __init__(self, pools: Sequence[KvMemory], parts: Sequence[KvPart], whole: KvLayout) -> None:
        """pools, parts: of all ranks, in order. Raises InvariantViolated if they aren't what the whole consists of."""
        super().__init__(whole.pool_bytes, "ranks")
        self.pools = pools
        self._parts = parts[0].parts
        self._part_bytes = whole.block_bytes // self._parts
        #: by part, the ranks that have it
        self.holders = [
            [rank for rank, part in enumerate(parts) if part.index == index] for index in range(self._parts)
        ]
        for rank, pool in enumerate(pools):
            if pool.num_bytes * self._parts != self.num_bytes:
                raise InvariantViolated("a rank's pool of another size", rank=rank, num_bytes=pool.num_bytes)

    def pieces(self, span: ByteSpan) -> Iterator[PartSpan]:
        """A span of the whole pool, part by part. Raises InvariantViolated if it isn't inside."""
        start = span.start
        if not 0 <= start <= span.end <= self.num_bytes:
            raise InvariantViolated("a span outside of the pool", span=span, num_bytes=self.num_bytes)
        at = start
        while at < span.end:
            place, inside = divmod(at, self._part_bytes)
            block, part = divmod(place, self._parts)
            length = min(self._part_bytes - inside, span.end - at)
            yield PartSpan(at - start, ByteSpan(block * self._part_bytes + inside, length), part)
            at += length
