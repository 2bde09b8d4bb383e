"""Which arithmetic is chosen, and the probe for row paddings."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pdserve.engine.model_config import BadModel
from pdserve.engine.numerics import (
    LinearKind,
    Precision,
    choose_precision,
    describe,
    has_native_bfloat16,
    safe_row_padding,
)


def test_auto_is_bfloat16_only_where_the_cpu_has_it() -> None:
    want = "bfloat16" if has_native_bfloat16() else "float32"
    assert choose_precision("auto").name == want
    assert choose_precision("auto") == choose_precision(want)


def test_bfloat16_keeps_a_bfloat16_pool_whatever_it_multiplies_with() -> None:
    precision = choose_precision("bfloat16")
    assert (precision.name, precision.kv) == ("bfloat16", torch.bfloat16)
    if not has_native_bfloat16() and precision.linear is LinearKind.FBGEMM_HALF:
        assert precision.compute is torch.float32


def test_an_unknown_dtype_names_what_is_supported() -> None:
    with pytest.raises(BadModel, match="dtype=int3, supported=auto, bfloat16, float32"):
        choose_precision("int3")


def steps_of(padding: int) -> tuple[object, int]:
    """A kernel whose last rows come out otherwise unless their number is a multiple of `padding`."""

    def linear(x: Tensor) -> Tensor:
        y = x @ torch.ones(8, 4)
        rest = len(x) % padding
        return y if not rest else torch.cat((y[:-rest], y[-rest:] + 1e-3))

    return linear, 8


@pytest.mark.parametrize("padding", [1, 2, 4, 6, 8, 12, 16])
def test_the_probe_finds_the_smallest_padding(padding: int) -> None:
    linear, width = steps_of(padding)
    assert callable(linear)
    assert safe_row_padding({"a": (linear, width)}, torch.float32) == padding


def test_the_probe_serves_all_matrices() -> None:
    linears = {str(padding): steps_of(padding) for padding in (4, 6)}
    found = safe_row_padding(
        {name: (linear, 8) for name, (linear, _) in linears.items() if callable(linear)}, torch.float32
    )
    assert found == 12


def test_a_kernel_that_never_holds_is_refused() -> None:
    with pytest.raises(BadModel, match="can't be made deterministic"):
        safe_row_padding({"a": (lambda x: x + 1e-3 * len(x), 8)}, torch.float32)


def test_large_functions_are_tried_with_many_rows_too() -> None:
    """A kernel that changes behind the reference's rows."""

    def linear(x: Tensor) -> Tensor:
        return x[:, :100] + 1e-3 * (len(x) > 300)

    with pytest.raises(BadModel, match="can't be made deterministic"):
        safe_row_padding({"a": (linear, 40_000)}, torch.float32)


def test_numerics_names_what_bits_depend_on() -> None:
    precision = Precision("bfloat16", torch.float32, torch.bfloat16, LinearKind.FBGEMM_HALF)
    text = describe(precision, 2)
    for part in ("bfloat16/float32/fbgemm-half/threads2/", torch.__version__):
        assert part in text
    assert describe(precision, 1) != text
