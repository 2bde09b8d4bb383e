"""Products of the compiled kernels against torch's, and the rule that a row's bits are its own."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pdserve.engine.native.library import Kernels
from pdserve.engine.native.linear import NativeLinear
from tests.support.native_kernels import EACH_VARIANT

each_variant = pytest.mark.parametrize("kernels", EACH_VARIANT)


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@each_variant
@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 70),
    outputs=st.integers(1, 200),
    half_width=st.integers(1, 120),
    seed=st.integers(0, 1000),
    has_bias=st.booleans(),
)
def test_products_are_those_of_torch(
    kernels: Kernels, rows: int, outputs: int, half_width: int, seed: int, has_bias: bool
) -> None:
    width = 2 * half_width
    weight = drawn(outputs, width, seed=seed).bfloat16()
    bias = drawn(outputs, seed=seed + 1).bfloat16() if has_bias else None
    x = drawn(rows, width, seed=seed + 2).to(kernels.activations)
    linear = NativeLinear(kernels, weight, bias)
    want = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    got = linear(x)
    assert got.dtype is kernels.activations
    torch.testing.assert_close(
        got.double(), want, atol=1e-5 * width, rtol=max(1e-5, torch.finfo(got.dtype).eps / 2)
    )


@each_variant
@pytest.mark.parametrize("width", [2, 576, 1536])
def test_a_rows_bits_depend_on_that_row_alone(kernels: Kernels, width: int) -> None:
    """Whatever its place and company, and on any number of threads."""
    linear = NativeLinear(kernels, drawn(100, width, seed=1).bfloat16(), drawn(100, seed=2))
    x = drawn(64, width, seed=3).to(kernels.activations)
    x[7], x[9] = float("nan"), float("inf")
    alone = torch.cat([linear(row[None]) for row in x])
    sound = torch.tensor([row for row in range(64) if row not in (7, 9)])
    before = torch.get_num_threads()
    try:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            for count in (2, 3, 6, 11, 12, 13, 32, 64):
                together = torch.cat([linear(part) for part in torch.split(x, count)])
                assert torch.equal(together[sound], alone[sound])
                assert torch.equal(together.isnan(), alone.isnan())
    finally:
        torch.set_num_threads(before)


@each_variant
def test_no_rows_give_none(kernels: Kernels) -> None:
    linear = NativeLinear(kernels, drawn(8, 16, seed=1).bfloat16(), None)
    assert linear(torch.empty(0, 16, dtype=kernels.activations)).shape == (0, 8)
