"""Both forms of attention against a plain one in float64, on mixed steps over a pool full of NaN."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from pdserve.engine.attention import BatchedAttention, Heads, Span, StepAttention, Turn
from pdserve.engine.kv_pool import KvPool
from pdserve.engine.tiled_attention import TiledAttention
from tests.unit.engine_torch.test_kv_pool import D, H, L, S, make_pool

GROUP = 2
LAYER = 1
TURNED = Turn(lambda projected, _: projected, torch.empty(0), None)
# By name: what they are, and the window of LAYER; the other layer has another one.
KINDS: dict[str, tuple[Heads, int]] = {
    "plain": (Heads(H * GROUP, H, D), 0),
    "window of a token": (Heads(H * GROUP, H, D, windows=(0, 1)), 1),
    "window below a block": (Heads(H * GROUP, H, D, windows=(0, 5)), 5),
    "window of a block": (Heads(H * GROUP, H, D, windows=(3, S)), S),
    "window of blocks and a token": (Heads(H * GROUP, H, D, windows=(0, 4 * S + 1)), 4 * S + 1),
    "window beyond": (Heads(H * GROUP, H, D, windows=(8, 100_000)), 100_000),
    "scaled": (Heads(H * GROUP, H, D, scale=0.7), 0),
    "capped": (Heads(H * GROUP, H, D, softcap=1.5), 0),
    "capped window": (Heads(H * GROUP, H, D, scale=0.9, softcap=2.0, windows=(0, 20)), 20),
}
# (positions before the step, tokens in the step), single tokens first and by length, as the runner orders them.
STEPS: dict[str, list[tuple[int, int]]] = {
    "one token": [(0, 1)],
    "decode": [(3, 1), (7, 1), (8, 1), (40, 1), (200, 1)],
    "chunk": [(0, 20)],
    "later chunks": [(17, 9), (8, 8), (5, 300)],
    "mixed": [(0, 1), (30, 1), (31, 1), (0, 5), (16, 16), (9, 40)],
}


def plain(history: Tensor, start: int, length: int, heads: Heads, window: int) -> Tensor:
    """Attention of the last `length` positions in float64.

    history  [positions, (2 · group + …)] float32 qkv rows of the whole sequence
    """
    rows = history.to(torch.float64)
    queries = rows[start : start + length, : heads.query_width].view(length, H, GROUP, D)
    keys, values = rows[: start + length, heads.query_width :].view(start + length, 2, H, D).unbind(1)
    scores = torch.einsum("qhgd,khd->hgqk", queries, keys) * heads.scale
    if heads.softcap:
        scores = heads.softcap * torch.tanh(scores / heads.softcap)
    positions = torch.arange(start, start + length)[:, None]
    visible = torch.arange(start + length) <= positions
    if window:
        visible &= torch.arange(start + length) > positions - window
    weights = torch.softmax(scores.masked_fill(~visible, float("-inf")), dim=-1)
    return torch.einsum("hgqk,khd->qhgd", weights, values).reshape(length, -1)


def build(form: str, pool: KvPool, spans: Sequence[Span], heads: Heads, num_rows: int) -> StepAttention:
    if form == "tiled":
        return TiledAttention(pool, spans, heads, num_rows)
    return BatchedAttention(pool, spans, heads, torch.float32, num_rows)


@pytest.mark.parametrize("form", ["batched", "tiled"])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(
    ("kind", "padding"), [("plain", 0), *((kind, 3) for kind in KINDS)], ids=lambda value: str(value)
)
def test_equals_plain_attention(form: str, step: str, kind: str, padding: int) -> None:
    heads, window = KINDS[kind]
    pool = make_pool(torch.float32, num_blocks=128)
    torch.frombuffer(pool.memory.bytes, dtype=torch.float32).fill_(float("nan"))
    generator = torch.Generator().manual_seed(1)
    blocks = list(range(128))
    random.Random(2).shuffle(blocks)
    spans: list[Span] = []
    histories: list[Tensor] = []
    first = 0
    for start, length in STEPS[step]:
        table = [blocks.pop() for _ in range(-(-(start + length) // S))]
        history = torch.randn(start + length, heads.query_width + 2 * H * D, generator=generator)
        if start:
            # What earlier steps left in the pool; the runner has zeroed the blocks that it began.
            pool.begin_blocks(table)
            build(form, pool, [Span(0, start, 0, table)], heads, start).attend(LAYER, history[:start], TURNED)
        elif length % S:
            pool.begin_blocks(table[-1:])
        spans.append(Span(first, length, start, table))
        histories.append(history)
        first += length
    qkv = torch.cat([history[span.start :] for span, history in zip(spans, histories, strict=True)])
    qkv = torch.cat((qkv, torch.full((padding, qkv.shape[1]), 5.0)))
    got = build(form, pool, spans, heads, len(qkv)).attend(LAYER, qkv, TURNED)
    want = torch.cat(
        [
            plain(history, span.start, span.length, heads, window)
            for span, history in zip(spans, histories, strict=True)
        ]
    )
    torch.testing.assert_close(got[: len(want)], want.to(torch.float32), atol=2e-6, rtol=1e-5)
    assert (got[len(want) :] == 0).all()
    assert L > LAYER
