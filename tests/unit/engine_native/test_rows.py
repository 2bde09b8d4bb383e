"""Norms and gates of the compiled kernels against float64, and a row's bits beside others."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from pdserve.engine.native.library import Kernels
from pdserve.engine.native.rows import NativeGate, NativeNorm
from tests.support.native_kernels import EACH_VARIANT

each_variant = pytest.mark.parametrize("kernels", EACH_VARIANT)
sizes = given(
    rows=st.integers(1, 40), width=st.integers(1, 40).map(lambda n: 16 * n), seed=st.integers(0, 99)
)


def drawn(kernels: Kernels, *shape: int, seed: int) -> Tensor:
    return (3 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).to(kernels.activations)


def check(got: Tensor, want: Tensor) -> None:
    """To a rounding of the activations' dtype, and one of float32."""
    step = 2.0**-8 if got.dtype is torch.bfloat16 else 2.0**-20
    torch.testing.assert_close(got.double(), want, atol=1e-6, rtol=step * 1.01)


@each_variant
@settings(max_examples=30, deadline=None)
@sizes
def test_norms(kernels: Kernels, rows: int, width: int, seed: int) -> None:
    x, more = drawn(kernels, rows, width, seed=seed), drawn(kernels, rows, width, seed=seed + 1)
    weight = torch.rand(width, generator=torch.Generator().manual_seed(seed))
    norm = NativeNorm(kernels, weight - 1, 1e-5, offset=1.0)
    check(norm(x), functional.rms_norm(x.double(), (width,), (weight - 1 + 1).double(), 1e-5))
    total = x + more
    want = norm(total)
    assert torch.equal(norm.after_adding_(x, more), want)
    assert torch.equal(x, total)


@each_variant
@settings(max_examples=30, deadline=None)
@sizes
def test_gates(kernels: Kernels, rows: int, width: int, seed: int) -> None:
    x = drawn(kernels, rows, 2 * width, seed=seed)
    gate, up = x.double().chunk(2, dim=1)
    check(NativeGate(kernels, "silu")(x), functional.silu(gate) * up)
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    want = 0.5 * gate * (1 + torch.tanh(inner)) * up
    got = NativeGate(kernels, "gelu_tanh")(x).double()
    # Far below zero 1 + tanh cancels, in float32 as well.
    torch.testing.assert_close(got, want, atol=2e-5, rtol=2.0**-7)


@each_variant
def test_a_rows_bits_depend_on_that_row_alone(kernels: Kernels) -> None:
    x = drawn(kernels, 40, 96, seed=1)
    x[3] = float("nan")
    norm, gate = NativeNorm(kernels, torch.ones(96), 1e-5, 0.0), NativeGate(kernels, "silu")
    for function in (norm, gate):
        alone = torch.cat([function(row[None].clone()) for row in x])
        sound = torch.arange(40) != 3
        assert torch.equal(function(x)[sound], alone[sound])
        assert function(x)[3].isnan().all()
