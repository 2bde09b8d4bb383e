"""Between workers of 1, 2 and 4 ranks: the bytes of every head that P's ranks write are those that D's ranks read.

The pools are the engine's, the blocks move in pieces as links cut them, and nobody between knows of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer.pieces import BlockPieces
from pdserve.engine.kv_pool import KvPool, KvReader, KvWriter
from pdserve.engine.layout import KvLayout
from pdserve.engine.parallel.parted_pool import PartedPool
from pdserve.engine.parallel.shard import KvPart, Shard
from pdserve.errors import InvariantViolated
from pdserve.kv_memory import ByteSpan, HostMemory
from pdserve.node.parted_copies import PartedCopies

SIZES = (1, 2, 4)


@dataclass(frozen=True)
class Hop:
    """P's blocks, the blocks of D that they go into, and how they are cut."""

    layout: KvLayout
    source: tuple[int, ...]
    target: tuple[int, ...]
    piece_bytes: int
    seed: int


@st.composite
def hops(draw: st.DrawFn) -> Hop:
    layout = KvLayout(
        num_blocks=draw(st.integers(4, 9)),
        kv_heads=draw(st.sampled_from((1, 2, 4, 8))),
        layers=draw(st.integers(1, 3)),
        block_size=draw(st.sampled_from((1, 4, 16))),
        head_dim=draw(st.sampled_from((2, 6, 16))),
        dtype="float32",
        item_bytes=4,
    )
    count = draw(st.integers(1, 4))
    blocks = st.permutations(range(layout.num_blocks))
    source, target = (tuple(draw(blocks)[:count]) for _ in range(2))
    return Hop(layout, source, target, draw(st.integers(1, layout.block_bytes + 5)), draw(st.integers(0, 99)))


class Worker:
    """A pool, and each rank's view of it."""

    def __init__(self, layout: KvLayout, size: int) -> None:
        self.memory = HostMemory(layout.pool_bytes)
        self.parts = [Shard(rank, size).kv_part(layout.kv_heads) for rank in range(size)]
        self.pools = [
            KvPool(part.layout(layout), torch.float32, lambda num_bytes: self.memory) for part in self.parts
        ]
        torch.frombuffer(self.memory.bytes, dtype=torch.uint8).fill_(0xEE)


def values_of(hop: Hop) -> torch.Tensor:
    """What each head has at each position: [kv_heads, layers, 2, positions, head_dim]."""
    layout = hop.layout
    return torch.randn(
        layout.kv_heads,
        layout.layers,
        2,
        len(hop.source) * layout.block_size,
        layout.head_dim,
        generator=torch.Generator().manual_seed(hop.seed),
    )


def write(worker: Worker, hop: Hop, values: torch.Tensor) -> None:
    """Each rank its heads, as a step does."""
    size, positions = hop.layout.block_size, range(values.shape[3])
    for part, pool in zip(worker.parts, worker.pools, strict=True):
        own = values[part.range(hop.layout.kv_heads)]
        table = part.table(hop.source)
        writer = KvWriter(pool, [table[at // size] for at in positions], [at % size for at in positions])
        for layer in range(hop.layout.layers):
            # [tokens, 2 · heads · head_dim], K heads then V heads
            writer.write(layer, own[:, layer].permute(2, 1, 0, 3).reshape(len(positions), -1))


def move(hop: Hop, source: Worker, target: Worker) -> None:
    pieces = BlockPieces(hop.layout.block_bytes, hop.piece_bytes)
    for piece in range(len(hop.source) * pieces.pieces_per_block):
        block, offset, length = pieces.span(piece)
        here, there = (ids[block] * hop.layout.block_bytes + offset for ids in (hop.source, hop.target))
        target.memory.view(ByteSpan(there, length))[:] = source.memory.view(ByteSpan(here, length))


@pytest.mark.parametrize(("prefill", "decode"), list(product(SIZES, SIZES)))
@settings(max_examples=15, deadline=None)
@given(hop=hops())
def test_heads_end_where_they_belong(prefill: int, decode: int, hop: Hop) -> None:
    values = values_of(hop)
    source, target = Worker(hop.layout, prefill), Worker(hop.layout, decode)
    write(source, hop, values)
    move(hop, source, target)
    for part, pool in zip(target.parts, target.pools, strict=True):
        reader = KvReader(pool, [part.table(hop.target)], torch.float32)
        own = values[part.range(hop.layout.kv_heads)]
        for layer in range(hop.layout.layers):
            reader.load(layer)
            assert torch.equal(reader.keys, own[:, layer, 0])
            assert torch.equal(reader.values, own[:, layer, 1])
    untouched = set(range(hop.layout.num_blocks)) - set(hop.target)
    size = hop.layout.block_bytes
    for block in untouched:
        assert set(target.memory.view(ByteSpan(block * size, size))) == {0xEE}


@given(hop=hops(), size=st.sampled_from(SIZES))
def test_ranks_divide_every_block(hop: Hop, size: int) -> None:
    """Their parts are all heads, in order; the same part twice only where there are more ranks than KV heads."""
    heads = hop.layout.kv_heads
    parts = [Shard(rank, size).kv_part(heads) for rank in range(size)]
    assert [head for part in dict.fromkeys(parts) for head in range(heads)[part.range(heads)]] == [
        *range(heads)
    ]
    assert (len(set(parts)) < size) == Shard(0, size).shares_heads(heads)
    for part in parts:
        own = part.layout(hop.layout)
        assert own.pool_bytes == hop.layout.pool_bytes
        assert own.block_bytes * part.parts == hop.layout.block_bytes
        assert replace(own, kv_heads=heads, num_blocks=hop.layout.num_blocks) == hop.layout


class RankCopies:
    """HostCopies of one rank's device, done at once."""

    def __init__(self, memory: HostMemory) -> None:
        self._memory = memory
        self._pinned = memoryview(b"")

    def pin(self, num_bytes: int) -> memoryview:
        self._pinned = memoryview(bytearray(num_bytes))
        return self._pinned

    def share(self, pinned: memoryview) -> None:
        self._pinned = pinned

    def fetch(self, span: ByteSpan, into: int) -> None:
        self._pinned[into : into + span.num_bytes] = self._memory.view(span)

    def store(self, start: int, into: ByteSpan) -> None:
        self._memory.view(into)[:] = self._pinned[start : start + into.num_bytes]

    def record(self) -> int:
        return 0

    def is_over(self, event: int) -> bool:
        return True


class OnDevices:
    """A pool for each rank, and what its links copy by."""

    def __init__(self, layout: KvLayout, size: int) -> None:
        self.parts = [Shard(rank, size).kv_part(layout.kv_heads) for rank in range(size)]
        self.memories = [HostMemory(layout.pool_bytes // part.parts) for part in self.parts]
        self.pool = PartedPool(self.memories, self.parts, layout)
        self.copies = PartedCopies(self.pool, [RankCopies(memory) for memory in self.memories])
        self.pinned = self.copies.pin(layout.block_bytes)


@pytest.mark.parametrize(("prefill", "decode"), list(product(SIZES, SIZES)))
@settings(max_examples=15, deadline=None)
@given(hop=hops())
def test_between_devices_every_rank_gets_its_heads(prefill: int, decode: int, hop: Hop) -> None:
    """Of P's ranks each writes its own pool; a piece goes through pinned memory of P and of D."""
    layout, heads = hop.layout, hop.layout.kv_heads
    source, target = OnDevices(layout, prefill), OnDevices(layout, decode)
    whole = torch.randint(
        0, 256, (layout.num_blocks, layout.block_bytes), dtype=torch.uint8,
        generator=torch.Generator().manual_seed(hop.seed),
    )  # fmt: skip
    by_head = whole.view(layout.num_blocks, heads, layout.head_bytes)
    for part, memory in zip(source.parts, source.memories, strict=True):
        torch.frombuffer(memory.bytes, dtype=torch.uint8).copy_(by_head[:, part.range(heads)].reshape(-1))
    pieces = BlockPieces(layout.block_bytes, hop.piece_bytes)
    for piece in range(len(hop.source) * pieces.pieces_per_block):
        block, offset, length = pieces.span(piece)
        here, there = (ids[block] * layout.block_bytes + offset for ids in (hop.source, hop.target))
        source.copies.fetch(ByteSpan(here, length), 0)
        target.pinned[:length] = source.pinned[:length]
        target.copies.store(0, ByteSpan(there, length))
    want = torch.zeros_like(by_head)
    want[list(hop.target)] = by_head[list(hop.source)]
    for part, memory in zip(target.parts, target.memories, strict=True):
        got = torch.frombuffer(memory.bytes, dtype=torch.uint8)
        assert torch.equal(got, want[:, part.range(heads)].reshape(-1))


def test_a_span_outside_is_a_bug() -> None:
    layout = KvLayout(
        num_blocks=2, kv_heads=2, layers=1, block_size=1, head_dim=2, dtype="float32", item_bytes=4
    )
    pool = OnDevices(layout, 2).pool
    for span in (ByteSpan(-1, 2), ByteSpan(60, 8)):
        with pytest.raises(InvariantViolated):
            list(pool.pieces(span))
    with pytest.raises(InvariantViolated, match="another size"):
        PartedPool([HostMemory(32), HostMemory(31)], [KvPart(0, 2), KvPart(1, 2)], layout)
