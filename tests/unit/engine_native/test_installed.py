"""Kernels are there. Tests of them are skipped where there are none, which would hide that they don't compile."""

from __future__ import annotations

import pytest

from pdserve.engine.native import library


@pytest.mark.skipif(not library.supported(), reason="there are none for this CPU")
def test_all_variants_of_this_cpu_are_installed() -> None:
    assert library.available() == library.supported(), library.why_none()
