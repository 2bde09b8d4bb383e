"""The compiled kernels that this machine can run, each as a test's parameter."""

from __future__ import annotations

import pytest

from pdserve.engine.native import library
from pdserve.engine.native.library import Kernels
from pdserve.modelstore.errors import BadModel


def _loaded(variant: str) -> Kernels | None:
    try:
        return library.load(variant)
    except BadModel:
        return None


def _why_not(variant: str) -> str:
    if variant in library.supported():
        return "not built: python -m pip install -e ."
    return "this CPU can't run it"


ALL = {variant: _loaded(variant) for variant in library.VARIANTS}

EACH_VARIANT = [
    pytest.param(kernels, id=variant, marks=() if kernels else pytest.mark.skip(reason=_why_not(variant)))
    for variant, kernels in ALL.items()
]
