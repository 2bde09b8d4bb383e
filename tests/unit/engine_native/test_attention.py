"""Attention of the compiled kernels against a plain one in float64, over a pool whose other blocks are full of NaN."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from pdserve.engine.attention import Heads, Span, Turn, begun_blocks
from pdserve.engine.kv_pool import KvPool
from pdserve.engine.layers import HeadNorm
from pdserve.engine.layout import KvLayout
from pdserve.engine.model_config import RopeConfig
from pdserve.engine.native.attention import NativeAttention, fits
from pdserve.engine.native.library import Kernels
from pdserve.engine.rotary import Rotary, rotate_
from tests.support.native_kernels import EACH_VARIANT

LAYER, NUM_LAYERS, NUM_BLOCKS = 1, 2, 200
each_variant = pytest.mark.parametrize("kernels", EACH_VARIANT)


@dataclass(frozen=True)
class Kind:
    """A model's heads; window: of LAYER, the other layer has another one."""

    kv_heads: int = 3
    group: int = 3
    head_dim: int = 64
    block_size: int = 16
    window: int = 0
    scale: float = 0.0
    softcap: float = 0.0
    has_norm: bool = False

    def heads(self) -> Heads:
        windows = (0, self.window) if self.window else ()
        return Heads(
            self.kv_heads * self.group, self.kv_heads, self.head_dim,
            scale=self.scale, softcap=self.softcap, windows=windows,
        )  # fmt: skip

    def pool(self) -> KvPool:
        layout = KvLayout(
            num_blocks=NUM_BLOCKS, kv_heads=self.kv_heads, layers=NUM_LAYERS, block_size=self.block_size,
            head_dim=self.head_dim, dtype="bfloat16", item_bytes=2,
        )  # fmt: skip
        pool = KvPool(layout, torch.bfloat16)
        pool.tensor.fill_(float("nan"))
        return pool


KINDS = {
    "plain": Kind(),
    "normalised heads": Kind(has_norm=True),
    "one query head": Kind(group=1, kv_heads=2),
    "many query heads": Kind(kv_heads=1, group=40, head_dim=32),
    "head of 80": Kind(head_dim=80, kv_heads=2, group=2),
    "head of 256, small blocks": Kind(head_dim=256, kv_heads=1, group=4, block_size=8),
    "large blocks": Kind(block_size=48),
    "window of a token": Kind(window=1),
    "window in a tile": Kind(window=50),
    "window beyond a span": Kind(window=300),
    "capped window": Kind(scale=0.9, softcap=2.0, window=20),
}
# (positions before the step, tokens in the step)
STEPS: dict[str, list[tuple[int, int]]] = {
    "one token": [(0, 1)],
    "decode": [(3, 1), (63, 1), (64, 1), (256, 1), (700, 1)],
    "chunk": [(0, 100)],
    "mixed": [(0, 1), (300, 1), (0, 5), (9, 260), (500, 40)],
}


class World:
    """Sequences of drawn projections, and what attention should make of them."""

    def __init__(self, kernels: Kernels, kind: Kind) -> None:
        self.kernels, self.kind, self.heads = kernels, kind, kind.heads()
        self.pool = kind.pool()
        self.generator = torch.Generator().manual_seed(1)
        self.blocks = list(range(NUM_BLOCKS))
        random.Random(2).shuffle(self.blocks)
        self.rotary = Rotary(RopeConfig(base=10_000.0), kind.head_dim, kind.head_dim)
        self.norm: HeadNorm | None = None
        if kind.has_norm:
            weight = torch.rand(kind.kv_heads * (kind.group + 1), kind.head_dim, generator=self.generator)
            self.norm = HeadNorm(weight[: -kind.kv_heads], weight[-kind.kv_heads :], 1e-5)

    def history(self, length: int) -> Tensor:
        width = self.kind.kv_heads * (self.kind.group + 2) * self.kind.head_dim
        return torch.randn(length, width, generator=self.generator).to(self.kernels.activations)

    def table(self, length: int) -> list[int]:
        return [self.blocks.pop() for _ in range(-(-length // self.kind.block_size))]

    def attend(self, spans: Sequence[Span], projected: Tensor) -> Tensor:
        """One step of LAYER."""
        self.pool.begin_blocks(begun_blocks(spans, self.kind.block_size))
        positions = torch.tensor([at for span in spans for at in range(span.start, span.end)])
        turn = Turn(_unused, self.rotary.turns(positions), self.norm)
        attention = NativeAttention(self.kernels, self.pool, spans, self.heads)
        return attention.attend(LAYER, projected, turn).clone()

    def want(self, history: Tensor, span: Span) -> Tensor:
        """The span's rows in float64."""
        kind, group = self.kind, self.kind.group
        turned = history[: span.end].to(torch.float32, copy=True)
        queries_keys = turned[:, : -kind.kv_heads * kind.head_dim]
        if self.norm is not None:
            self.norm.apply_(queries_keys)
        rotate_(queries_keys, self.rotary.turns(torch.arange(span.end)))
        parts = turned.view(span.end, -1, kind.head_dim)
        queries = parts[span.start :, : kind.kv_heads * group].to(self.kernels.activations).double()
        keys, values = parts[:, kind.kv_heads * group :].bfloat16().double().chunk(2, dim=1)
        queries = queries.view(span.length, kind.kv_heads, group, kind.head_dim)
        scores = torch.einsum("qhgd,khd->hgqk", queries, keys) * self.heads.scale
        if kind.softcap:
            scores = kind.softcap * torch.tanh(scores / kind.softcap)
        positions, seen = torch.arange(span.start, span.end)[:, None], torch.arange(span.end)
        hidden = seen > positions
        if kind.window:
            hidden |= seen <= positions - kind.window
        weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1)
        return torch.einsum("hgqk,khd->qhgd", weights, values).reshape(span.length, -1)


def _unused(*_: Tensor) -> Tensor:
    raise AssertionError("the kernel turns")


@each_variant
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("kind", KINDS)
def test_equals_plain_attention(kernels: Kernels, kind: str, step: str) -> None:
    world = World(kernels, KINDS[kind])
    assert fits(world.heads, world.pool)
    spans: list[Span] = []
    wanted: list[Tensor] = []
    rows: list[Tensor] = []
    for start, length in STEPS[step]:
        history, table = world.history(start + length), world.table(start + length)
        if start:
            world.attend([Span(0, start, 0, table)], history[:start])
        spans.append(Span(sum(map(len, rows)), length, start, table))
        rows.append(history[start:])
        wanted.append(world.want(history, spans[-1]))
    got = world.attend(spans, torch.cat(rows))
    # bfloat16 products round the weights to 8 bits; the others see float32.
    tolerance = 2e-2 if kernels.activations is torch.bfloat16 else 1e-4
    torch.testing.assert_close(got.double(), torch.cat(wanted), atol=tolerance, rtol=tolerance)


@each_variant
@pytest.mark.parametrize("kind", ["plain", "head of 80", "window beyond a span", "capped window"])
def test_a_rows_bits_do_not_depend_on_cuts_company_or_threads(kernels: Kernels, kind: str) -> None:
    length = 620
    world = World(kernels, KINDS[kind])
    history = world.history(length)
    whole = world.attend([Span(0, length, 0, world.table(length))], history)
    before = torch.get_num_threads()
    try:
        for num_threads, ends in ((1, [300, 619, 620]), (2, [1, 2, 63, 65, 256, 257, 400, 512, 513, 620])):
            torch.set_num_threads(num_threads)
            company, table = world.table(40), world.table(length)
            for begin, end in zip([0, *ends], ends, strict=False):
                spans = [Span(0, end - begin, begin, table), Span(end - begin, 7, 0, company)]
                rows = torch.cat((history[begin:end], history[:7]))
                assert torch.equal(world.attend(spans, rows)[: end - begin], whole[begin:end]), (begin, end)
    finally:
        torch.set_num_threads(before)


@each_variant
def test_a_nan_stays_in_its_row(kernels: Kernels) -> None:
    """And isn't hidden: the sampler must see it."""
    world = World(kernels, KINDS["plain"])
    history = world.history(30)
    broken = history.clone()
    broken[-1, 5] = float("nan")
    clean = world.attend([Span(0, 30, 0, world.table(30))], history)
    got = world.attend([Span(0, 30, 0, world.table(30))], broken)
    assert got[-1, :64].isnan().all()
    assert torch.equal(got[:-1], clean[:-1])


def test_what_the_kernel_has_no_sizes_for() -> None:
    assert not fits(Kind(head_dim=24).heads(), Kind(head_dim=24).pool())
    assert not fits(Kind(head_dim=272).heads(), Kind(head_dim=272).pool())
