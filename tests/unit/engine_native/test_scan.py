"""Compiled passes over logits find what torch's find, bit for bit: many equals, any length and range."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pdserve.engine.native.library import Kernels
from pdserve.engine.native.scan import NativeScan
from pdserve.engine.port import SampleSpec
from pdserve.engine.row_scan import TORCH_SCAN
from pdserve.engine.sampler import sample
from pdserve.sampling import SampleKey, SamplingParams
from tests.support.native_kernels import EACH_VARIANT

each_variant = pytest.mark.parametrize("kernels", EACH_VARIANT)
WIDTHS = st.integers(1, 100) | st.integers(2030, 2070) | st.integers(8_190, 8_210)
# How finely values are rounded: many equals, or none.
STEPS = st.sampled_from([0.0, 0.5, 4.0])
SCALES = st.sampled_from([1e-38, 1e-3, 3.0, 1e37])


def drawn(rows: int, width: int, seed: int, scale: float = 3.0, step: float = 0.0) -> Tensor:
    values = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))
    return (torch.round(values / step) * step if step else values) * scale


@each_variant
@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 9), width=WIDTHS, seed=st.integers(0, 999), scale=SCALES, step=STEPS,
    broken=st.lists(st.tuples(st.integers(0, 8), st.integers(0, 99_999), st.sampled_from(["nan", "inf", "-inf"]))),
)  # fmt: skip
def test_the_best_and_whether_all_are_finite(
    kernels: Kernels, rows: int, width: int, seed: int, scale: float, step: float,
    broken: list[tuple[int, int, str]],
) -> None:  # fmt: skip
    logits = drawn(rows, width, seed, scale, step)
    for row, place, value in broken:
        logits[row % rows, place % width] = float(value)
    best, sound = NativeScan(kernels).best(logits)
    want, sound_too = TORCH_SCAN.best(logits)
    assert sound == sound_too
    assert [one for one, fine in zip(best, sound, strict=True) if fine] == [
        one for one, fine in zip(want, sound, strict=True) if fine
    ]
    assert all(0 <= one < width for one in best)


@each_variant
def test_all_of_a_row_out_of_range(kernels: Kernels) -> None:
    for value in ("nan", "inf", "-inf"):
        best, sound = NativeScan(kernels).best(torch.full((2, 77), float(value)))
        assert (best[0] in range(77), sound) == (True, [False, False])


@each_variant
@settings(max_examples=50, deadline=None)
@given(
    width=WIDTHS, seed=st.integers(0, 999), scale=SCALES, step=STEPS,
    top_k=st.integers(0, 60) | st.integers(2000, 2100) | st.just(8_189) | st.just(2**32 - 1),
    min_p=st.sampled_from([0.0, 1e-9, 0.05, 0.5, 1.0]),
    temperature=st.sampled_from([1e-308, 0.01, 0.7, 1.0, 5.0, 1e300]),
    order=st.sampled_from(["drawn", "ascending", "descending"]),
)  # fmt: skip
def test_what_min_p_and_top_k_leave(
    kernels: Kernels, width: int, seed: int, scale: float, step: float, top_k: int, min_p: float,
    temperature: float, order: str,
) -> None:  # fmt: skip
    logits = drawn(1, width, seed, scale, step)[0]
    if order != "drawn":
        logits = torch.sort(logits, descending=order == "descending").values
    params = SamplingParams(top_k=top_k, min_p=min_p, temperature=temperature)
    best = int(logits.argmax())
    got = NativeScan(kernels).shortlist(logits, best, params)
    want = TORCH_SCAN.shortlist(logits, best, params)
    everything = torch.arange(width)
    assert torch.equal(
        everything if got.ids is None else got.ids, everything if want.ids is None else want.ids
    )
    assert torch.equal(got.left, want.left)


@each_variant
def test_the_tokens_are_the_same(kernels: Kernels) -> None:
    logits = drawn(24, 5_000, seed=1, step=0.01)
    logits[5, 17] = float("nan")
    kinds = (
        SamplingParams(temperature=0), SamplingParams(), SamplingParams(top_k=40, temperature=0.8),
        SamplingParams(top_k=50, top_p=0.9), SamplingParams(min_p=0.02, typical_p=0.5),
        SamplingParams(temperature=0, repetition_penalty=1.2),
    )  # fmt: skip
    specs = [
        SampleSpec(
            SampleKey(params=kinds[row % 6], seed=row, choice=0, eos_token_ids=(), max_tokens=9), (1, 2, 3), 3
        )
        for row in range(24)
    ]
    found, want = (
        [(output.token_id, str(output.error)) for output in sample(logits, specs, scan)]
        for scan in (NativeScan(kernels), TORCH_SCAN)
    )
    assert found == want
