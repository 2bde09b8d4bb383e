"""The arithmetic that production takes on one CPU or another, as far as this CPU can compute it."""

from __future__ import annotations

import pytest

from pdserve.engine.numerics import Precision, choose_precision
from pdserve.modelstore.errors import BadModel

# With bf16 instructions, without them, and float32. oneDNN emulates bfloat16 with AVX-512, and refuses with less.
_PRODUCTION = (("bfloat16", "onednn"), ("bfloat16", "fbgemm-half"), ("float32", "onednn"))


def _found() -> list[Precision]:
    found = [choose_precision("bfloat16")]
    for dtype, linear in _PRODUCTION:
        try:
            precision = choose_precision(dtype, linear)
        except BadModel:
            continue
        if precision not in found:
            found.append(precision)
    return found


PRODUCTION = _found()

# This CPU's own always, the others among the slow tests.
OWN_FIRST = [
    pytest.param(
        precision,
        id=f"{precision.name} {precision.linear.value}",
        marks=() if precision == choose_precision("bfloat16") else pytest.mark.slow,
    )
    for precision in PRODUCTION
]
