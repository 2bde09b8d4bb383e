"""Packed weights lie one behind the other, each as it was given."""

from __future__ import annotations

import torch

from pdserve.engine.native.weight_memory import WeightMemory


def test_weights_lie_in_order_and_stay() -> None:
    memory = WeightMemory()
    given = [torch.randn(rows, 30).bfloat16() for rows in (3, 64, 1)]
    with torch.inference_mode():  # as a runner loads
        placed = [memory.place(given[0].t())]
    placed += [memory.place(each) for each in given[1:]]  # and as others do, in what is left of the chunk
    for weight, want in zip(placed, [given[0].t(), *given[1:]], strict=True):
        assert weight.is_contiguous() and weight.data_ptr() % 64 == 0
        assert torch.equal(weight, want)
    ends = [each.data_ptr() + each.numel() * each.itemsize for each in placed]
    gaps = [after.data_ptr() - end for after, end in zip(placed[1:], ends, strict=False)]
    assert all(0 <= gap < 64 for gap in gaps), gaps


def test_a_matrix_larger_than_a_chunk_and_what_follows_it() -> None:
    memory = WeightMemory()
    large = torch.ones(33 << 20, dtype=torch.bfloat16)
    assert torch.equal(memory.place(large), large)
    small = torch.arange(7.0)
    assert torch.equal(memory.place(small), small)
