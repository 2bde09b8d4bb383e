"""Matrices that are decoded late: any order and any part of their rows, as of the values themselves."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quantize
from torch import Tensor

from pdserve.engine.dequant import decode
from pdserve.engine.stored_matrix import StoredMatrix, StoredRows


def quantised(rows: int, width: int, kind: str, seed: int = 1) -> tuple[StoredMatrix, Tensor]:
    """And its values, decoded as a whole."""
    values = np.random.default_rng(seed).standard_normal((rows, width), dtype=np.float32)
    raw = torch.from_numpy(quantize(values, GGMLQuantizationType[kind])).view(rows, -1)
    return StoredMatrix([StoredRows(raw, kind)], width), decode(raw.view(-1), kind).view(rows, width)


def plain(rows: int, width: int) -> tuple[StoredMatrix, Tensor]:
    values = torch.randn(rows, width, generator=torch.Generator().manual_seed(1)).bfloat16()
    return StoredMatrix.plain(values), values


@pytest.mark.parametrize("stored", [quantised(24, 64, "Q8_0"), quantised(24, 64, "Q4_1"), plain(24, 64)])
def test_rows_are_picked_and_split_as_those_of_a_tensor(stored: tuple[StoredMatrix, Tensor]) -> None:
    matrix, values = stored
    assert matrix.shape == values.shape == (24, 64)
    assert torch.equal(matrix.values(), values)
    order = torch.randperm(24, generator=torch.Generator().manual_seed(2))
    turned = matrix.reordered(lambda rows: rows[order])
    twice = turned.reordered(lambda rows: rows.flip(0))
    assert torch.equal(twice.values(), values[order].flip(0))
    sizes: list[int] | int
    for sizes in (7, 24, 100, [3, 20, 1]):
        for part, want in zip(twice.split(sizes), torch.split(twice.values(), sizes), strict=True):
            assert torch.equal(part.values(), want)
        for part, want in zip(matrix.split(sizes), torch.split(values, sizes), strict=True):
            assert torch.equal(part.values(), want)


def test_a_plain_matrix_is_not_copied() -> None:
    matrix, values = plain(24, 64)
    assert matrix.values().data_ptr() == values.data_ptr()
    assert matrix.split(24)[0].values().data_ptr() == values.data_ptr()
    assert not matrix.is_quantised
    assert quantised(4, 32, "Q8_0")[0].is_quantised


def test_parts_of_other_types_make_one_matrix() -> None:
    first, values = quantised(4, 32, "Q8_0")
    second, others = plain(3, 32)
    both = StoredMatrix([*first.parts, *second.parts], 32)
    assert both.shape == (7, 32) and not both.is_quantised
    assert torch.equal(both.values(), torch.cat((values, others.float())))


@pytest.mark.parametrize(
    ("stored", "is_decoded"),
    [(quantised(6, 128, "Q8_0"), True), (quantised(6, 128, "Q4_1"), True), (plain(6, 128), False)],
)
def test_columns_are_those_of_a_tensor(stored: tuple[StoredMatrix, Tensor], is_decoded: bool) -> None:
    """A cut through a stored unit decodes them; others stay as they are stored."""
    matrix, values = stored
    half = values.shape[1] // 2
    turned = matrix.reordered(lambda rows: rows.flip(0))
    for begin, end in ((0, half), (half, 2 * half), (7, half + 1)):
        assert torch.equal(matrix.columns(begin, end).values(), values[:, begin:end])
        assert torch.equal(turned.columns(begin, end).values(), values.flip(0)[:, begin:end])
    assert matrix.columns(0, half).is_quantised == matrix.is_quantised
    assert matrix.columns(7, half).is_quantised == (matrix.is_quantised and not is_decoded)
    assert torch.equal(matrix.rows(2, 5).columns(0, half).values(), values[2:5, :half])
    assert matrix.columns(0, 2 * half) is matrix
