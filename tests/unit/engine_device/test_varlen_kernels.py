"""What torch's paged attention is asked for: by a function that means what torch's documentation says, on any CPU."""

from __future__ import annotations

import inspect
import random
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from pdserve.engine.attention import Heads
from pdserve.engine.device.device_pool import DevicePool
from pdserve.engine.device.devices import CpuDevice
from pdserve.engine.device.paged_attention import GatheredKernels
from pdserve.engine.device.varlen_kernels import VarlenKernels, varlen_attend
from pdserve.engine.layout import KvLayout


def as_documented(
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
) -> Tensor:
    """Row by row and head by head."""
    assert cu_seq_q.dtype is seqused_k.dtype is block_table.dtype is torch.int32
    assert key.shape == value.shape and key.stride(-1) == value.stride(-1) == query.stride(-1) == 1
    group = query.shape[1] // key.shape[2]
    assert enable_gqa == (group > 1)
    left, right = window_size
    assert right == 0
    result = torch.empty_like(query)
    firsts, ends = cu_seq_q.tolist(), seqused_k.tolist()
    for row, (first, last) in enumerate(pairwise(firsts)):
        length, end = last - first, ends[row]
        assert length <= max_q and end <= max_k
        own = block_table[row].to(torch.int64)
        keys, values = (each[own].flatten(0, 1)[:end] for each in (key, value))
        at = torch.arange(end - length, end)[:, None]
        seen = torch.arange(end)
        hidden = (seen > at) | ((seen < at - left) if left >= 0 else False)
        for head in range(query.shape[1]):
            scores = query[first:last, head] @ keys[:, head // group].T * scale
            weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1)
            result[first:last, head] = weights @ values[:, head // group]
    return result


@pytest.mark.parametrize("seed", range(20))
def test_it_sees_what_the_gathered_kernels_see(seed: int) -> None:
    source = random.Random(seed)
    kv_heads, group, size, block = (source.choice(each) for each in ((1, 2, 3), (1, 2, 5), (8, 16), (4, 16)))
    layout = KvLayout(
        num_blocks=20, kv_heads=kv_heads, layers=2, block_size=block, head_dim=size, dtype="float32", item_bytes=4
    )  # fmt: skip
    heads = Heads(kv_heads * group, kv_heads, size, windows=(0, source.choice([1, 3, 9, 500])))
    pool = DevicePool(layout, torch.float32, CpuDevice())
    generator = torch.Generator().manual_seed(seed)
    pool.tensor.normal_(generator=generator)
    gathered = GatheredKernels(pool, heads)
    kernels = VarlenKernels(pool, heads, gathered, as_documented)
    order = torch.randperm(20, generator=generator).to(torch.int32)
    ends = torch.tensor([source.randrange(1, 5 * block + 1) for _ in range(3)], dtype=torch.int32)
    length = source.randrange(2, 3 * block)
    start = source.randrange(0, 5 * block - length)
    queries = torch.randn(3 + length, kv_heads * group, size, generator=generator)
    got, want = torch.empty(2, *queries.shape)
    for layer in (0, 1):
        for each, outputs in ((kernels, got), (gathered, want)):
            each.attend_singles(layer, queries[:3], order[:15].view(3, 5), ends, outputs[:3])
            each.attend_chunk(layer, queries[3:], order[15:], start, outputs[3:])
        torch.testing.assert_close(got, want, atol=2e-6, rtol=0)


def test_all_layers_of_a_step_share_what_says_where_its_rows_are() -> None:
    layout = KvLayout(
        num_blocks=4, kv_heads=1, layers=2, block_size=4, head_dim=8, dtype="float32", item_bytes=4
    )  # fmt: skip
    heads = Heads(1, 1, 8)
    pool = DevicePool(layout, torch.float32, CpuDevice())
    told: list[tuple[int, int]] = []

    def attend(
        query: Tensor, key: Tensor, value: Tensor, firsts: Tensor, *args: object, **named: Any
    ) -> Tensor:
        told.append((firsts.data_ptr(), named["seqused_k"].data_ptr()))
        return query

    kernels = VarlenKernels(pool, heads, GatheredKernels(pool, heads), attend)
    queries, ends = torch.zeros(2, 1, 8), torch.ones(2, dtype=torch.int32)
    for layer in (0, 1):
        kernels.attend_singles(layer, queries, torch.zeros(2, 1, dtype=torch.int32), ends, queries)
        kernels.attend_chunk(layer, queries, torch.zeros(1, dtype=torch.int32), 1, queries)
    assert told[:2] == told[2:]


def test_torch_knows_these_arguments() -> None:
    assert (
        list(inspect.signature(as_documented).parameters)[:7]
        == list(inspect.signature(varlen_attn).parameters)[:7]
    )
    assert set(inspect.signature(as_documented).parameters) <= set(inspect.signature(varlen_attn).parameters)


@pytest.mark.parametrize(
    ("block_size", "softcap", "compute", "want"),
    [
        (256, 0.0, torch.bfloat16, True),
        (512, 0.0, torch.bfloat16, True),
        (16, 0.0, torch.bfloat16, False),
        (256, 30.0, torch.bfloat16, False),
        (256, 0.0, torch.float32, False),
    ],
)
def test_it_is_tried_only_where_torch_takes_it(
    block_size: int, softcap: float, compute: torch.dtype, want: bool
) -> None:
    layout = KvLayout(
        num_blocks=2, kv_heads=2, layers=1, block_size=block_size, head_dim=64, dtype="bfloat16", item_bytes=2
    )  # fmt: skip
    assert (varlen_attend(layout, Heads(4, 2, 64, softcap=softcap), compute) is not None) == want
