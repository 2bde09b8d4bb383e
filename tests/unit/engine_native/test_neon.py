"""The NEON variant, by an emulated CPU: the contract tests of the other variants, for each kernel but attention."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

from pdserve.engine.native.library import Kernels
from tests.support.emulated import QEMU, Emulated, compile_calls
from tests.support.quantised import KINDS
from tests.unit.engine_native import test_linear, test_packed, test_rows, test_scan

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(QEMU is None, reason="no qemu-aarch64 here (Debian: qemu-user-static)"),
    pytest.mark.skipif(
        importlib.util.find_spec("ziglang") is None, reason="no ziglang here: pip install ziglang"
    ),
]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernels]:
    emulated = Emulated(compile_calls(tmp_path_factory.mktemp("neon")))
    yield emulated.kernels()
    emulated.close()


def test_norms_and_gates(kernels: Kernels) -> None:
    test_rows.test_norms(kernels)
    test_rows.test_gates(kernels)
    test_rows.test_a_rows_bits_depend_on_that_row_alone(kernels)


def test_scans(kernels: Kernels) -> None:
    test_scan.test_the_best_and_whether_all_are_finite(kernels)
    test_scan.test_all_of_a_row_out_of_range(kernels)
    test_scan.test_what_min_p_and_top_k_leave(kernels)
    test_scan.test_the_tokens_are_the_same(kernels)


@pytest.mark.parametrize("kind", KINDS)
def test_products_as_stored(kernels: Kernels, kind: str) -> None:
    test_packed.test_products_are_those_of_what_is_stored(kernels, kind)


def test_products_of_rows_of_several_tensors(kernels: Kernels) -> None:
    test_packed.test_rows_of_several_tensors_in_any_order(kernels)
    test_packed.test_a_part_of_the_columns(kernels)
    test_packed.test_a_single_number_that_is_none_makes_all_results_so(kernels)


def test_products(kernels: Kernels) -> None:
    test_linear.test_products_are_those_of_torch(kernels)
    for width in (2, 576):
        test_linear.test_a_rows_bits_depend_on_that_row_alone(kernels, width)
