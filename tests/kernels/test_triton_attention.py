"""Triton's kernels against the gathered ones, on drawn shapes, by Triton's interpreter: `make test-kernels`."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from pdserve.engine.attention import Heads, Turn
from pdserve.engine.device.device_pool import DevicePool
from pdserve.engine.device.devices import CpuDevice
from pdserve.engine.device.paged_attention import GatheredKernels
from pdserve.engine.layers import HeadNorm
from pdserve.engine.layout import KvLayout
from pdserve.engine.model_config import RopeConfig
from pdserve.engine.rotary import Rotary, rotate_

triton = pytest.importorskip("triton", reason="Triton isn't installed: make test-kernels")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("runs in Triton's interpreter: make test-kernels", allow_module_level=True)

from pdserve.engine.device.triton_attention import TritonKernels  # noqa: E402  needs Triton

pytestmark = pytest.mark.slow
WITHIN = 2e-6
LAYER = 1


@dataclass(frozen=True)
class World:
    """A pool of NaN, heads, and both kinds of kernels on it."""

    pool: DevicePool
    heads: Heads
    gathered: GatheredKernels
    triton: TritonKernels
    generator: torch.Generator

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def write(self, blocks: list[int], length: int) -> None:
        """K and V of a row's first positions; what lies behind them stays NaN."""
        size = self.pool.layout.block_size
        for position in range(length):
            place = self.pool.indexed[blocks[position // size], :, LAYER, :, position % size]
            place.copy_(self.random(*place.shape).to(self.pool.tensor.dtype).view(place.dtype))


def draw_world(source: random.Random, dtype: torch.dtype = torch.float32) -> World:
    """Whatever a model may have: groups that are no power of two, heads of any width, windows, soft caps."""
    kv_heads, group = source.choice([1, 2, 3]), source.choice([1, 2, 3, 4, 7])
    size = source.choice([8, 16, 24, 32, 64, 80])
    layout = KvLayout(
        num_blocks=24,
        kv_heads=kv_heads,
        layers=3,
        block_size=source.choice([4, 8, 16, 32]),
        head_dim=size,
        dtype=str(dtype).removeprefix("torch."),
        item_bytes=dtype.itemsize,
    )
    heads = Heads(
        kv_heads * group,
        kv_heads,
        size,
        scale=source.choice([0.0, 0.05, 0.3]),
        softcap=source.choice([0.0, 0.0, 5.0, 50.0]),
        windows=(0, source.choice([0, 0, 1, 5, 16, 70, 10_000]), 3),
    )
    pool = DevicePool(layout, dtype, CpuDevice())
    pool.indexed.fill_(0x7F if dtype is torch.float8_e4m3fn else float("nan"))
    generator = torch.Generator().manual_seed(source.getrandbits(32))
    return World(
        pool,
        heads,
        GatheredKernels(pool, heads),
        TritonKernels(pool, heads, source.choice([1, 8, 40])),
        generator,
    )


def assert_close(got: Tensor, want: Tensor) -> None:
    assert torch.isfinite(want).all()
    assert float((got - want).abs().max()) <= WITHIN


@pytest.mark.parametrize("seed", range(100))
def test_single_tokens(seed: int) -> None:
    source = random.Random(seed)
    world = draw_world(source)
    size = world.pool.layout.block_size
    blocks = list(range(world.pool.layout.num_blocks))
    source.shuffle(blocks)
    ends = [
        source.choice([1, 2, size, size + 1, source.randrange(1, 7 * size)])
        for _ in range(source.choice([1, 3]))
    ]
    width = max(-(-end // size) for end in ends) + source.choice([0, 3])
    tables = torch.zeros(len(ends), width, dtype=torch.int32)
    for row, end in enumerate(ends):
        own = [blocks.pop() for _ in range(-(-end // size))]
        tables[row, : len(own)] = torch.tensor(own)
        world.write(own, end)
    queries = world.random(len(ends), world.heads.query_width // world.heads.head_dim, world.heads.head_dim)
    got, want = torch.empty(2, *queries.shape)
    for kernels, outputs in ((world.triton, got), (world.gathered, want)):
        kernels.attend_singles(LAYER, queries, tables, torch.tensor(ends, dtype=torch.int32), outputs)
    assert_close(got, want)


@pytest.mark.parametrize("seed", range(6))
def test_sixteen_bits(seed: int) -> None:
    """Products are of the pool's dtype, sums are float32: weights and results are rounded, nothing else.

    float16, since the interpreter multiplies bfloat16 as the integers that it keeps them in.
    """
    world = draw_world(random.Random(3000 + seed), torch.float16)
    size = world.pool.layout.block_size
    blocks = list(range(-(-37 // size)))
    world.write(blocks, 37)
    queries = world.random(5, world.heads.query_width // world.heads.head_dim, world.heads.head_dim)
    queries = queries.to(torch.float16)
    got, want = torch.empty(2, *queries.shape, dtype=torch.float16)
    table = torch.tensor(blocks, dtype=torch.int32)
    for kernels, outputs in ((world.triton, got), (world.gathered, want)):
        kernels.attend_chunk(LAYER, queries[1:], table, 33, outputs[1:])
        kernels.attend_singles(
            LAYER, queries[:1], table[None], torch.tensor([33], dtype=torch.int32), outputs[:1]
        )
    assert float((got.float() - want.float()).abs().max()) < 4e-3


@pytest.mark.parametrize("seed", range(6))
def test_a_pool_of_8_bits(seed: int) -> None:
    """Widened when it is read, narrowed within its range when it is written; all else as ever."""
    world = draw_world(random.Random(4000 + seed), torch.float8_e4m3fn)
    heads, size = world.heads, world.pool.layout.block_size
    blocks = list(range(-(-37 // size)))
    world.write(blocks, 37)
    queries = world.random(5, heads.query_width // heads.head_dim, heads.head_dim)
    got, want = torch.empty(2, *queries.shape)
    table = torch.tensor(blocks, dtype=torch.int32)
    for kernels, outputs in ((world.triton, got), (world.gathered, want)):
        kernels.attend_chunk(LAYER, queries[1:], table, 33, outputs[1:])
        kernels.attend_singles(
            LAYER, queries[:1], table[None], torch.tensor([33], dtype=torch.int32), outputs[:1]
        )
    assert_close(got, want)
    # Numbers that need no rounding, which the interpreter does wrongly just below a power of two; and two beyond all.
    drawn = world.random(1, heads.query_width + 2 * heads.num_kv_heads * heads.head_dim)
    projected = drawn.mul(90).clamp(-448, 448).to(torch.float8_e4m3fn).to(torch.float32)
    projected[0, -2:] = torch.tensor([-1000.0, 1000.0])
    turns = torch.ones(1, 1, heads.head_dim // 2, dtype=torch.complex64)
    stored: list[Tensor] = []
    for kernels in (world.triton, world.gathered):
        world.pool.indexed.zero_()
        kernels.store(
            LAYER, projected, Turn(lambda rows, _: rows, turns, None), torch.tensor([5], dtype=torch.int32)
        )
        stored.append(world.pool.tensor.to(torch.float32))
    assert torch.equal(*stored)
    assert stored[0].abs().max() == 448


@pytest.mark.parametrize("seed", range(100))
def test_chunks(seed: int) -> None:
    source = random.Random(1000 + seed)
    world = draw_world(source)
    size = world.pool.layout.block_size
    start = source.choice([0, 1, size, source.randrange(6 * size)])
    length = source.choice([2, size, source.randrange(2, 3 * size + 2)])
    blocks = source.sample(range(world.pool.layout.num_blocks), -(-(start + length) // size))
    world.write(blocks, start + length)
    queries = world.random(length, world.heads.query_width // world.heads.head_dim, world.heads.head_dim)
    got, want = torch.empty(2, *queries.shape)
    table = torch.tensor([*blocks, 0], dtype=torch.int32)
    for kernels, outputs in ((world.triton, got), (world.gathered, want)):
        kernels.attend_chunk(LAYER, queries, table, start, outputs)
    assert_close(got, want)


@pytest.mark.parametrize("seed", range(30))
def test_heads_are_normalised_turned_and_stored(seed: int) -> None:
    """Also where rows are parts of wider ones."""
    source = random.Random(2000 + seed)
    world = draw_world(source)
    heads, layout = world.heads, world.pool.layout
    num_heads, num_tokens = heads.query_width // heads.head_dim, source.randrange(1, 6)
    norm: HeadNorm | None = None
    if source.random() < 0.5:
        norm = HeadNorm(
            world.random(num_heads, heads.head_dim), world.random(layout.kv_heads, heads.head_dim), 1e-5
        )
    rotary = Rotary(RopeConfig(), heads.head_dim, source.choice([heads.head_dim, heads.head_dim // 2]))
    width = heads.query_width + 2 * layout.kv_heads * heads.head_dim

    def turned(projected: Tensor, turns: Tensor) -> Tensor:
        rows = projected.clone()
        rotated = rows[:, : heads.query_width + layout.kv_heads * heads.head_dim]
        if norm is not None:
            norm.apply_(rotated)
        rotate_(rotated, turns)
        return rows

    turns = rotary.turns(torch.tensor([source.randrange(3000) for _ in range(num_tokens)]))
    projected = world.random(num_tokens, width + source.choice([0, 4]))[:, :width]
    slots = torch.tensor(
        source.sample(range(layout.num_blocks * layout.block_size), num_tokens), dtype=torch.int32
    )
    world.pool.tensor.zero_()
    want = world.gathered.store(LAYER, projected, Turn(turned, turns, norm), slots)
    want_pool = world.pool.tensor.clone()
    world.pool.tensor.zero_()
    got = world.triton.store(LAYER, projected, Turn(turned, turns, norm), slots)
    assert_close(got, want)
    assert_close(world.pool.tensor, want_pool)


def test_what_is_visible_and_not_a_number_shows() -> None:
    """In this row alone: it has to fail, not to give something."""
    world = draw_world(random.Random(1))
    world.write([0], 3)
    world.write([1], 3)
    world.pool.tensor[1, 0, LAYER, 1, 0, 0] = float("nan")
    queries = world.random(2, world.heads.query_width // world.heads.head_dim, world.heads.head_dim)
    got = torch.empty_like(queries)
    heads = Heads(len(queries[0]), world.heads.num_kv_heads, world.heads.head_dim)
    kernels = TritonKernels(world.pool, heads, 1)
    kernels.attend_singles(
        LAYER, queries, torch.tensor([[0], [1]], dtype=torch.int32), torch.tensor([3, 3]), got
    )
    assert torch.isfinite(got[0]).all()
    assert not torch.isfinite(got[1]).all()
