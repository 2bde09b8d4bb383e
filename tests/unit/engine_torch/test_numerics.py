"""Which arithmetic is chosen."""

from __future__ import annotations

import pytest
import torch

from pdserve.engine.layers import make_linear
from pdserve.engine.native import library
from pdserve.engine.native.packed import PackedLinear
from pdserve.engine.numerics import (
    LinearKind,
    Precision,
    choose_precision,
    describe,
    has_native_bfloat16,
)
from pdserve.modelstore.errors import BadModel
from tests.support.quantised import drawn_blocks


def test_auto_is_bfloat16_where_something_multiplies_it() -> None:
    by_torch = "bfloat16" if has_native_bfloat16() else "float32"
    assert choose_precision("auto", kernels="torch") == choose_precision(by_torch, kernels="torch")
    want = "bfloat16" if library.available() else by_torch
    assert choose_precision("auto") == choose_precision(want)


@pytest.mark.skipif("avx2" not in library.available(), reason="not built, or another CPU")
def test_a_cpu_of_avx2_keeps_weights_as_they_are_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """float32 would dequantise those that are quantised, and take twice the memory for others."""
    monkeypatch.setattr(torch.cpu, "_is_avx512_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    for kernels in ("auto", "native"):
        precision = choose_precision("auto", kernels=kernels)
        assert precision.kernels is not None
        assert (precision.kernels.variant, precision.compute) == ("avx2", torch.float32)
        matrix = drawn_blocks(8, 64, "Q8_0", torch.Generator().manual_seed(1))
        assert isinstance(make_linear(precision, matrix), PackedLinear)
    assert choose_precision("auto", kernels="torch").name == "float32"


def test_bfloat16_keeps_a_bfloat16_pool_whatever_it_multiplies_with() -> None:
    precision = choose_precision("bfloat16")
    assert (precision.name, precision.kv) == ("bfloat16", torch.bfloat16)
    if not has_native_bfloat16() and precision.linear is LinearKind.FBGEMM_HALF:
        assert precision.compute is torch.float32


def test_an_unknown_dtype_names_what_is_supported() -> None:
    with pytest.raises(BadModel, match="dtype=int3, supported=auto, bfloat16, float32"):
        choose_precision("int3")


def test_numerics_names_what_bits_depend_on() -> None:
    precision = Precision("bfloat16", torch.float32, torch.bfloat16, LinearKind.FBGEMM_HALF)
    text = describe(precision, 2)
    for part in ("bfloat16/float32/fbgemm-half/threads2/", torch.__version__):
        assert part in text
    assert describe(precision, 1) != text


@pytest.mark.parametrize(
    ("dtype", "linear", "want"),
    [
        ("float32", "plain", ("float32", torch.float32, torch.float32)),
        ("bfloat16", "plain", ("bfloat16", torch.bfloat16, torch.bfloat16)),
        ("bfloat16", "fbgemm-half", ("bfloat16", torch.float32, torch.bfloat16)),
        ("auto", "fbgemm-half", ("bfloat16", torch.float32, torch.bfloat16)),
    ],
)
def test_a_kind_of_product_can_be_asked_for(
    dtype: str, linear: str, want: tuple[str, torch.dtype, torch.dtype]
) -> None:
    assert choose_precision(dtype, linear) == Precision(*want, LinearKind(linear))


@pytest.mark.parametrize(
    ("dtype", "linear", "message"),
    [
        ("bfloat16", "mkl", "linear=mkl, supported=fbgemm-half, onednn, plain"),
        ("float32", "fbgemm-half", "no such product for this dtype .linear=fbgemm-half, dtype=float32."),
    ],
)
def test_a_kind_of_product_that_is_not_there_is_one_line(dtype: str, linear: str, message: str) -> None:
    with pytest.raises(BadModel, match=message):
        choose_precision(dtype, linear)
