"""Products meet few numbers of rows, and what the library keeps of their kernels is bounded."""

from __future__ import annotations

import pytest
import torch

from pdserve.engine.kernel_caches import bound_kernel_caches, rounded_rows
from pdserve.engine.layers import OneDnnLinear
from pdserve.engine.numerics import choose_precision

MOST_ROWS = 512 + 64  # a step's tokens, and decodes beside them


def test_few_numbers_of_rows_and_little_more_than_asked_for() -> None:
    numbers = {rounded_rows(num_rows) for num_rows in range(1, MOST_ROWS + 1)}
    assert len(numbers) == 57
    assert [rounded_rows(num_rows) for num_rows in (0, 1, 15, 16, 17, 33, 512)] == [0, 1, 15, 16, 18, 36, 512]
    for num_rows in range(1, MOST_ROWS + 1):
        assert num_rows <= rounded_rows(num_rows) <= num_rows * 9 / 8
        assert rounded_rows(rounded_rows(num_rows)) == rounded_rows(num_rows)


@pytest.mark.parametrize("num_rows", [1, 16, 17, 33, 67, 130])
def test_a_product_gives_as_many_rows_as_it_gets(num_rows: int) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    weight, x = torch.randn(48, 32, generator=generator), torch.randn(num_rows, 32, generator=generator)
    bias = torch.randn(48, generator=generator)
    got = OneDnnLinear(weight, bias)(x)
    torch.testing.assert_close(got, torch.nn.functional.linear(x, weight, bias))


def test_a_step_has_the_rows_that_its_products_want() -> None:
    def padded(linear: str) -> int:
        return choose_precision("float32", linear).padded(100)

    assert (padded("plain"), padded("onednn")) == (100, 104)


def test_both_caches_are_bounded_unless_the_environment_says_otherwise() -> None:
    environ = {"LRU_CACHE_CAPACITY": "7"}
    bound_kernel_caches(environ)
    assert int(environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"]) < 1024
    assert environ["LRU_CACHE_CAPACITY"] == "7"
