"""Products with weights as they are stored, against the values that these stand for."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pdserve.engine.layers import make_linear
from pdserve.engine.native.library import Kernels
from pdserve.engine.native.linear import NativeLinear
from pdserve.engine.native.packed import PackedLinear
from pdserve.engine.numerics import choose_precision
from pdserve.engine.stored_matrix import StoredMatrix
from pdserve.modelstore.gguf_types import SUPPORTED
from tests.support.native_kernels import EACH_VARIANT
from tests.support.quantised import KINDS, drawn_blocks

each_variant = pytest.mark.parametrize("kernels", EACH_VARIANT)
each_kind = pytest.mark.parametrize("kind", KINDS)
GROUP = 32


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def drawn_matrix(kind: str, rows: int, width: int, seed: int) -> StoredMatrix:
    return drawn_blocks(rows, width, kind, torch.Generator().manual_seed(seed))


def as_bytes(x: Tensor) -> tuple[Tensor, Tensor]:
    """Activations of 8 bits, groups of 32 with a scale: what they stand for, and half a step of each, float64."""
    groups = x.float().view(len(x), -1, GROUP)
    most = groups.abs().amax(dim=-1, keepdim=True)
    q = torch.where(most > 0, torch.round(groups * (127 / most)), 0)
    step = (most / 127).double()
    return (q.double() * step).view(x.shape), (step / 2).expand(groups.shape).reshape(x.shape)


def near_tie(x: Tensor) -> Tensor:
    """Which activations lie so near the middle of two bytes that rounding decides between them: 1 or 0, float64."""
    groups = x.double().view(len(x), -1, GROUP)
    scaled = groups * (127 / groups.abs().amax(dim=-1, keepdim=True).clamp(min=1e-30))
    return ((scaled - scaled.floor() - 0.5).abs() < 1e-4).double().view(x.shape)


@each_variant
@each_kind
@settings(max_examples=8, deadline=None)
@given(
    rows=st.integers(1, 30) | st.integers(90, 200),
    outputs=st.integers(1, 70),
    units=st.integers(1, 3),
    seed=st.integers(0, 1000),
    has_bias=st.booleans(),
)
def test_products_are_those_of_what_is_stored(
    kernels: Kernels, kind: str, rows: int, outputs: int, units: int, seed: int, has_bias: bool
) -> None:
    width = units * max(SUPPORTED[kind].num_values, 3 * GROUP)
    matrix = drawn_matrix(kind, outputs, width, seed)
    bias = drawn(outputs, seed=seed + 1).bfloat16() if has_bias else None
    x = drawn(rows, width, seed=seed + 2).to(kernels.activations)
    x[0] = 0  # no scale divides by nothing
    got = PackedLinear(kernels, matrix, bias)(x)
    assert got.dtype is kernels.activations

    weight, added = matrix.values().double(), 0 if bias is None else bias.double()
    quantised, half_step = as_bytes(x)
    want = quantised @ weight.t() + added
    rounding = 2**-8 if kernels.activations is torch.bfloat16 else 1e-5
    # Two ways of computing x · 127 / most may fall on both sides of a tie, more than once in a row.
    ties = 2 * half_step * near_tie(x) @ weight.abs().t()
    cancelled = 1e-5 * (quantised.abs() @ weight.abs().t())  # sums of terms that are larger than what is left
    assert (got.double() - want).abs().le(rounding * (want.abs() + 1e-2) + cancelled + ties).all()
    exact = x.double() @ weight.t() + added
    allowed = half_step @ weight.abs().t()
    assert (got.double() - exact).abs().le(1.01 * allowed + rounding * (exact.abs() + 1e-2)).all()


@each_variant
def test_rows_of_several_tensors_in_any_order(kernels: Kernels) -> None:
    """As queries, keys and values are one matrix, of which a file may have the last in a format of its own."""
    first, second = drawn_matrix("Q4_K", 48, 512, seed=1), drawn_matrix("Q6_K", 21, 512, seed=2)
    order = torch.randperm(48, generator=torch.Generator().manual_seed(3))
    turned = first.reordered(lambda rows: rows[order])
    stacked = StoredMatrix([*turned.parts, *second.parts], 512)
    assert torch.equal(stacked.values(), torch.cat((first.values()[order], second.values())))
    x = drawn(5, 512, seed=4).to(kernels.activations)
    got = PackedLinear(kernels, stacked, None)(x)
    assert torch.equal(got[:, :48], PackedLinear(kernels, first, None)(x)[:, order])
    assert torch.equal(got[:, 48:], PackedLinear(kernels, second, None)(x))


@each_variant
def test_a_part_of_the_columns(kernels: Kernels) -> None:
    """As ranks of a divided model have them: what the whole gives where all other columns meet zeros."""
    whole = drawn_matrix("Q4_K", 40, 1024, seed=1)
    part = whole.columns(256, 768)
    assert part.is_quantised
    x = drawn(3, 512, seed=2).to(kernels.activations)
    padded = torch.nn.functional.pad(x, (256, 256))
    assert torch.equal(PackedLinear(kernels, part, None)(x), PackedLinear(kernels, whole, None)(padded))


@each_variant
@pytest.mark.parametrize(("kind", "width"), [("Q8_0", 576), ("Q4_1", 1536), ("Q6_K", 512)])
def test_a_rows_bits_depend_on_that_row_alone(kernels: Kernels, kind: str, width: int) -> None:
    """Whatever its place and company, and on any number of threads."""
    linear = PackedLinear(kernels, drawn_matrix(kind, 100, width, seed=1), drawn(100, seed=2))
    x = drawn(130, width, seed=3).to(kernels.activations)
    x[7], x[9] = float("nan"), float("inf")
    alone = torch.cat([linear(row[None]) for row in x])
    assert not alone[[7, 9]].isfinite().any()
    sound = torch.tensor([row for row in range(130) if row not in (7, 9)])
    assert alone[sound].isfinite().all()
    before = torch.get_num_threads()
    try:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            for count in (2, 3, 6, 11, 12, 13, 64, 97, 130):
                together = torch.cat([linear(part) for part in torch.split(x, count)])
                assert torch.equal(together[sound], alone[sound])
                assert torch.equal(together.isfinite(), alone.isfinite())
    finally:
        torch.set_num_threads(before)


@each_variant
def test_a_single_number_that_is_none_makes_all_results_so(kernels: Kernels) -> None:
    """Wherever in a group it stands: else what follows would be finite, and wrong."""
    linear = PackedLinear(kernels, drawn_matrix("Q8_0", 16, 64, seed=1), None)
    x = drawn(32, 64, seed=3)
    x.fill_diagonal_(float("nan"))
    assert not linear(x.to(kernels.activations)).isfinite().any()


@each_variant
def test_no_rows_give_none(kernels: Kernels) -> None:
    linear = PackedLinear(kernels, drawn_matrix("Q8_0", 8, 64, seed=1), None)
    assert linear(torch.empty(0, 64, dtype=kernels.activations)).shape == (0, 8)


def test_only_what_is_quantised_as_a_whole_stays_as_it_is_stored() -> None:
    quantised, plain = drawn_matrix("Q8_0", 4, 32, seed=1), StoredMatrix.plain(drawn(4, 32, seed=1))
    precision = choose_precision("bfloat16")
    if precision.kernels is None:
        pytest.skip("no compiled kernels here")
    assert isinstance(make_linear(precision, quantised), PackedLinear)
    for other in (plain, StoredMatrix([*quantised.parts, *plain.parts], 32)):
        assert isinstance(make_linear(precision, other), NativeLinear)
    assert not isinstance(make_linear(choose_precision("bfloat16", kernels="torch"), quantised), PackedLinear)
