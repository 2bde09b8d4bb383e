"""The pool's index arithmetic against plain indexing of the six dimensions."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from pdserve.engine.kv_pool import KvPool, KvReader, KvWriter
from pdserve.engine.layout import KvLayout
from pdserve.kv_memory import HostMemory

H, L, S, D = 3, 4, 8, 12
HUGE_PAGE = 2 << 20


def make_pool(dtype: torch.dtype, num_blocks: int = 10, head_dim: int = D) -> KvPool:
    layout = KvLayout(
        num_blocks=num_blocks,
        kv_heads=H,
        layers=L,
        block_size=S,
        head_dim=head_dim,
        dtype=str(dtype).removeprefix("torch."),
        item_bytes=dtype.itemsize,
    )
    return KvPool(layout, dtype)


def six_dimensions(pool: KvPool) -> torch.Tensor:
    """[num_blocks, kv_heads, layers, 2, block_size, head_dim] over the same bytes."""
    flat = torch.frombuffer(pool.memory.bytes, dtype=pool.dtype)
    return flat.view(-1, H, L, 2, S, pool.layout.head_dim)


@pytest.mark.parametrize("D", [4, 6, 90])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_write_and_gather(dtype: torch.dtype, D: int) -> None:
    pool = make_pool(dtype, head_dim=D)
    six = six_dimensions(pool)
    six.zero_()
    generator = torch.Generator().manual_seed(1)
    blocks, offsets = [7, 7, 2, 9], [5, 6, 0, 7]
    writer = KvWriter(pool, blocks, offsets)
    written = torch.zeros_like(six)
    for layer in range(L):
        new = torch.randn(4, 2 * H * D, generator=generator)
        writer.write(layer, new)
        for token in range(4):
            by_head = new[token].view(2, H, D).to(dtype)
            written[blocks[token], :, layer, :, offsets[token]] = by_head.transpose(0, 1)
    assert torch.equal(six, written)

    tables = [[7, 2, 0], [9, 9, 7]]
    reader, again = (KvReader(pool, tables, wanted) for wanted in (torch.float32, dtype))
    for layer in range(L):
        for one in (reader, again):
            one.load(layer)
            for side, got in enumerate((one.keys, one.values)):
                want = (
                    six[torch.tensor(tables)][:, :, :, layer, side].transpose(1, 2).reshape(2 * H, 3 * S, D)
                )
                assert torch.equal(got, want.to(got.dtype))
    assert (reader.keys.dtype, again.keys.dtype) == (torch.float32, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("table", [[3, 4, 5, 6], [4], [3, 5, 6], [6, 5, 4]], ids=str)
def test_one_token_is_written_and_one_sequence_read_wherever_its_blocks_lie(
    table: list[int], dtype: torch.dtype
) -> None:
    pool = make_pool(dtype)
    six = six_dimensions(pool)
    six.normal_(generator=torch.Generator().manual_seed(2))
    want = six.clone()
    writer = KvWriter(pool, table[-1:], [3])
    reader, again = (KvReader(pool, [table], wanted) for wanted in (torch.float32, dtype))
    for layer in range(L):
        new = torch.randn(1, 2 * H * D)
        writer.write(layer, new)
        want[table[-1], :, layer, :, 3] = new.view(2, H, D).to(dtype).transpose(0, 1)
        for one in (reader, again):
            one.load(layer)
            for side, got in enumerate((one.keys, one.values)):
                kept = want[table][:, :, layer, side].transpose(0, 1).reshape(H, len(table) * S, D)
                assert torch.equal(got, kept.to(got.dtype))
    assert torch.equal(six, want)


def test_beginning_a_block_zeroes_it_alone() -> None:
    pool = make_pool(torch.float32)
    six = six_dimensions(pool)
    six.fill_(float("nan"))
    pool.begin_blocks([3, 8])
    clean = (six == 0).flatten(1).all(dim=1).tolist()
    assert [index for index, zero in enumerate(clean) if zero] == [3, 8]


def test_memory_is_the_pool() -> None:
    pool = make_pool(torch.bfloat16)
    assert pool.memory.num_bytes == pool.layout.pool_bytes
    pool.begin_blocks([1])
    size = pool.layout.block_bytes
    pool.memory.bytes[size : 2 * size] = b"\x01" * size
    assert (six_dimensions(pool)[1].contiguous().view(torch.uint8) == 1).all()


class NotingMemory(HostMemory):
    """Writes down what it is asked to prepare."""

    def __init__(self, num_bytes: int) -> None:
        self.ends: list[int] = []
        super().__init__(num_bytes)

    def prepare(self, end: int) -> None:
        self.ends.append(end)
        super().prepare(end)


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc")
def test_memory_grows_with_the_blocks_that_are_used() -> None:
    """A pool of a gigabyte takes none of it at first."""
    layout = KvLayout(
        num_blocks=2048, kv_heads=4, layers=32, block_size=16, head_dim=64, dtype="bfloat16", item_bytes=2
    )
    assert layout.pool_bytes == 1 << 30
    before = resident_bytes()
    pool = KvPool(layout, torch.bfloat16)
    fresh = resident_bytes() - before
    used = [0, 1, 2, 700]
    pool.prepare(used)
    for block in used:
        pool.tensor[block] = 1.0
    pages = len(used) * (layout.block_bytes + 2 * HUGE_PAGE)
    assert fresh < HUGE_PAGE
    assert len(used) * layout.block_bytes // 2 < resident_bytes() - before < pages + HUGE_PAGE


def resident_bytes() -> int:
    """Anonymous memory of this process."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if "RssAnon" in line)
    return int(line.split()[1]) * 1024


def test_memory_is_made_ready_before_a_step_writes_it() -> None:
    layout = make_pool(torch.float32).layout
    pool = KvPool(layout, torch.float32, NotingMemory)
    memory = pool.memory
    assert isinstance(memory, NotingMemory) and memory.ends == []
    KvWriter(pool, [2, 5, 5, 3], [7, 0, 1, 2])
    KvWriter(pool, [4], [0])
    pool.begin_blocks([])
    pool.begin_blocks([1, 7])
    assert memory.ends == [n * layout.block_bytes for n in (6, 5, 8)]
