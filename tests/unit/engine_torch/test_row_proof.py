"""Cutting rows into tiles, and the proof that tiles make bits independent of place and company."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from pdserve.engine.layers import OneDnnLinear, PlainLinear
from pdserve.engine.numerics import LinearKind, choose_precision
from pdserve.engine.row_proof import prove
from pdserve.engine.row_tiles import ROW_COUNTS, RowFunction, RowSubject, RowTiles
from pdserve.modelstore.errors import BadModel

WIDTH = 8


def has_onednn_bfloat16() -> bool:
    try:
        return choose_precision("bfloat16", "onednn").linear is LinearKind.ONEDNN
    except BadModel:
        return False


def product(x: Tensor) -> Tensor:
    """With a matrix that doubles four numbers."""
    return x[:, :4] * 2


def proven(function: RowFunction, counts: tuple[int, ...] = (2, 4, 8), width: int = WIDTH) -> tuple[int, ...]:
    tiles = RowTiles(counts)
    tiles.each(RowSubject("product", function, width, is_product=True))
    prove(tiles, torch.float32)
    return tiles.counts


@pytest.mark.parametrize("num_rows", range(200))
def test_tiles_hold_all_rows_and_cutting_them_again_changes_nothing(num_rows: int) -> None:
    tiles = RowTiles()
    cut = tiles.cut(num_rows)
    assert set(cut) <= set(ROW_COUNTS)
    assert cut == sorted(cut, reverse=True)
    assert num_rows <= sum(cut)
    assert not cut or sum(cut[:-1]) < num_rows
    assert tiles.cut(sum(cut)) == cut


@pytest.mark.parametrize(
    ("num_rows", "cut"), [(1, [4]), (4, [4]), (8, [4, 4]), (9, [16]), (33, [64]), (70, [64, 4, 4])]
)
def test_a_tile_that_would_be_half_empty_gives_way_to_smaller_ones(num_rows: int, cut: list[int]) -> None:
    assert RowTiles().cut(num_rows) == cut


@pytest.mark.parametrize("num_rows", [1, 4, 5, 100])
def test_functions_see_allowed_numbers_of_rows_only(num_rows: int) -> None:
    seen: list[int] = []

    def doubled(x: Tensor, positions: Tensor) -> Tensor:
        assert len(x) == len(positions)
        seen.append(len(x))
        return x * positions.unsqueeze(1)

    x, positions = torch.randn(num_rows, 3, 1), torch.arange(num_rows)
    got = RowTiles().each(RowSubject("doubled", doubled, 1))(x.squeeze(2), positions)
    assert torch.equal(got, x.squeeze(2) * positions.unsqueeze(1))
    assert seen == RowTiles().cut(num_rows)


def test_independent_rows_are_proven() -> None:
    assert proven(product) == (2, 4, 8)


@pytest.mark.parametrize("other", [2, 4])
def test_a_count_with_other_bits_is_left_out(other: int) -> None:
    kept = proven(lambda x: product(x) + 1e-3 * (len(x) == other))
    assert kept == tuple(count for count in (2, 4, 8) if count != other)


@pytest.mark.parametrize("place", range(8))
def test_one_place_with_other_bits_is_refused(place: int) -> None:
    def uneven(x: Tensor) -> Tensor:
        y = product(x)
        if len(x) == 8:
            y[place] += 1e-3
        return y

    with pytest.raises(BadModel, match=r"can't be made deterministic.*function=product, rows=8"):
        proven(uneven)


@pytest.mark.parametrize("company", [0.0, float("nan"), torch.finfo(torch.float32).max])
def test_rows_that_feel_their_company_are_refused(company: float) -> None:
    """A kernel that does something else if one of its rows is special."""

    def sociable(x: Tensor) -> Tensor:
        special = (x[:, 0].nan_to_num(-1.0) == torch.tensor(company).nan_to_num(-1.0)).any()
        return product(x) + 1e-3 * special * x[:, :1].isfinite()

    with pytest.raises(BadModel, match="can't be made deterministic"):
        proven(sociable)


def test_a_rare_violation_is_found() -> None:
    """One row in two hundred differs, in one size of tiles."""

    def rare(x: Tensor) -> Tensor:
        y = x * 2
        if len(x) == 4:
            y = torch.where(x[:, :1].abs() > 2.81, y + 1e-3, y)
        return y

    tiles = RowTiles((4, 8))
    tiles.each(RowSubject("rare", rare, 100))
    prove(tiles, torch.float32)
    assert tiles.counts == (8,)


def test_the_order_of_a_sum_shows_in_most_rows_made_for_it_though_results_are_rounded() -> None:
    """Random rows hide most of what another order of adding changes in a bfloat16; those that cancel hide little."""
    width = 1536
    generator = torch.Generator().manual_seed(1)
    weight = (torch.randn(64, width, generator=generator) / math.sqrt(width)).bfloat16().float()
    tiles = RowTiles((4, 64))
    num_differing: list[int] = []

    def reordered(x: Tensor) -> Tensor:
        wide = x.float()
        in_order = (wide @ weight.t()).bfloat16()
        in_halves = (wide[:, ::2] @ weight[:, ::2].t() + wide[:, 1::2] @ weight[:, 1::2].t()).bfloat16()
        if len(x) == 64 and (x != 0).any(dim=1).all() and x.isfinite().all():
            num_differing.append(int((in_order != in_halves).any(dim=1).sum()))
        return in_halves if len(x) == 4 else in_order

    tiles.each(RowSubject("reordered", reordered, width, is_product=True))
    prove(tiles, torch.bfloat16)
    assert tiles.counts == (64,)
    random_and_cancelling = num_differing[1:17]  # behind the rows that find the weights
    assert sum(random_and_cancelling) > 0.8 * 16 * 32


@pytest.mark.skipif(not has_onednn_bfloat16(), reason="oneDNN has no bfloat16 product on this CPU")
def test_a_real_product_is_proven_for_the_counts_that_hold() -> None:
    """Of 1,536 numbers, oneDNN computes one row otherwise than several on CPUs with bf16 instructions."""
    weight = (torch.randn(576, 1536, generator=torch.Generator().manual_seed(1)) / 32).bfloat16()
    linear = OneDnnLinear(weight, None)
    x = torch.randn(512, 1536, generator=torch.Generator().manual_seed(2)).bfloat16()
    alone = torch.cat([linear(row) for row in torch.split(x, 1)])
    together = torch.cat([linear(rows) for rows in torch.split(x, 64)])
    tiles = RowTiles((1, *ROW_COUNTS))
    tiles.each(RowSubject("product", linear, 1536, is_product=True))
    prove(tiles, torch.bfloat16)
    assert tiles.counts == (ROW_COUNTS if not torch.equal(alone, together) else (1, *ROW_COUNTS))


def test_a_number_of_rows_that_changed_between_two_places_was_missed_before() -> None:
    """A violation in 6 % of rows, for one row only: trying each number of rows at one place misses it mostly."""

    def one_row_differs(x: Tensor) -> Tensor:
        y = x * 2
        return torch.where(x[:, :1].abs() > 1.88, y + 1e-3, y) if len(x) == 1 else y

    tiles = RowTiles((1, 4, 16))
    tiles.each(RowSubject("product", one_row_differs, 100))
    prove(tiles, torch.float32)
    assert tiles.counts == (4, 16)


def test_torch_s_own_product_is_proven_too() -> None:
    weight = torch.randn(96, 160, generator=torch.Generator().manual_seed(1))
    assert proven(PlainLinear(weight, None), ROW_COUNTS, 160)[-1] == ROW_COUNTS[-1]
