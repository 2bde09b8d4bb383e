"""The proof that deterministic mode starts with: a row's bits depend on that row alone.

Each function that a model applies row by row is given the same rows in tiles of each allowed size (`row_tiles`): in
order first, then shuffled, so that each row has another place and other company, some of it zeros, huge and tiny
numbers, or NaN. All results must be equal in bits. What is never cut is given them in groups of all small sizes
instead, one row alone among them. Rows of products are half random, half made to give away the order in which their
terms are added: two terms of one output are huge and cancel, so what is added between them is rounded coarsely.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pdserve.engine.row_tiles import RowSubject, RowTiles
from pdserve.modelstore.errors import BadModel

PROVEN_ROWS = 4096  # of each function, in each allowed number of rows
# Sizes of the groups in which an uncut function is given rows: all that its kernels have a way of their own for, and
# more of one row alone, as decode gives them.
ANY_COUNTS = (1, 1, 1, 1, *range(2, 18), 33, 64)
_ROUND_ROWS = 1024  # at a time: what a wide function gives for all would be as large as the model
_NUM_ALIENS = 3
_UNIT = 2.0**40  # next to it a bias is nothing
_CANCELLING = 2.0**30


def prove(tiles: RowTiles, dtype: torch.dtype) -> None:
    """Leave those of `tiles.counts` with which all subjects give the bits that they give with the largest.

    dtype  of the activations
    Raises BadModel if a row's place or company changes its bits even so, or those of an uncut function: this machine
    can't be deterministic then.
    """
    for subject in tiles.uncut.values():
        generator = torch.Generator().manual_seed(20)
        for _ in range(PROVEN_ROWS // _ROUND_ROWS):
            if not _Round(subject, ANY_COUNTS[-1], dtype, generator).holds_uncut():
                raise BadModel("this machine's kernels can't be made deterministic", function=subject.name)
    largest = tiles.counts[-1]
    held = set(tiles.counts)
    for subject in tiles.subjects.values():
        generator = torch.Generator().manual_seed(20)
        for _ in range(PROVEN_ROWS // _ROUND_ROWS):
            trial = _Round(subject, largest, dtype, generator)
            held -= {count for count in held if not trial.holds(count)}
            if largest not in held:
                raise BadModel(
                    "this machine's kernels can't be made deterministic", function=subject.name, rows=largest
                )
    tiles.counts = tuple(sorted(held))


class _Round:
    """Some rows, and what they gave in tiles of the largest size."""

    def __init__(
        self, subject: RowSubject, largest: int, dtype: torch.dtype, generator: torch.Generator
    ) -> None:
        self._apply = subject.apply
        self._generator = generator
        rows = torch.randn(_ROUND_ROWS, subject.width, generator=generator).to(dtype)
        if subject.is_product:
            self._make_cancel_(rows[::2], largest)
        self._reference = _bits(self._in_tiles(rows, largest))
        self._rows = torch.cat((rows, _company(subject.width, dtype)))

    def holds(self, count: int) -> bool:
        """Whether tiles of `count` rows give the same bits, whatever the rows' places and company are."""
        places = self._arranged(count)
        return self._is_reference(self._in_tiles(self._rows.index_select(0, places), count), places)

    def holds_uncut(self) -> bool:
        """The same for groups of `ANY_COUNTS`."""
        groups = self._grouped()
        got = [self._apply(self._rows.index_select(0, group)) for group in groups]
        return self._is_reference(torch.cat(got), torch.cat(groups))

    def _is_reference(self, got: Tensor, places: Tensor) -> bool:
        judged = places < _ROUND_ROWS
        return torch.equal(_bits(got)[judged], self._reference.index_select(0, places[judged]))

    def _in_tiles(self, rows: Tensor, count: int) -> Tensor:
        return torch.cat([self._apply(rows[at : at + count]) for at in range(0, len(rows), count)])

    def _arranged(self, count: int) -> Tensor:
        """Indices into `_rows`, tile by tile: all rows in a drawn order; in three tiles of eight, half are alien."""
        num_tiles = -(-_ROUND_ROWS * 16 // (13 * count))
        tile, place = torch.arange(num_tiles)[:, None], torch.arange(count)
        kind = tile % 8
        alien = (kind >= 5) & ((place + tile // 8) % 2 == 1)
        order = torch.randperm(_ROUND_ROWS, generator=self._generator)
        places = (_ROUND_ROWS - 5 + kind).expand(-1, count).clone()
        places[~alien] = order.repeat(2)[: int((~alien).sum())]
        return places.flatten()

    def _grouped(self) -> list[Tensor]:
        """Indices into `_rows`, group by group: all rows in a drawn order; in every other cycle, half are alien."""
        order = torch.randperm(_ROUND_ROWS, generator=self._generator)
        groups: list[Tensor] = []
        num_taken = 0
        while num_taken < _ROUND_ROWS:
            cycle, index = divmod(len(groups), len(ANY_COUNTS))
            place = torch.arange(ANY_COUNTS[index])
            alien = (place + cycle // 2) % 2 == 1 if cycle % 2 else torch.zeros_like(place, dtype=torch.bool)
            group = _ROUND_ROWS + (place + index) % _NUM_ALIENS
            own = order[num_taken : num_taken + int((~alien).sum())]
            group[torch.nonzero(~alien).flatten()[: len(own)]] = own
            groups.append(group)
            num_taken += len(own)
        return groups

    def _make_cancel_(self, rows: Tensor, count: int) -> None:
        """Change two numbers of each row, so that two terms of one output are huge and opposite."""
        width = rows.shape[1]
        inputs = torch.randint(width, (count,), generator=self._generator)
        units = torch.zeros(count, width, dtype=rows.dtype)
        units[torch.arange(count), inputs] = _UNIT
        weights = self._apply(units).to(torch.float32) / _UNIT
        first = torch.randint(count, (len(rows),), generator=self._generator)
        second = (first + torch.randint(1, count, (len(rows),), generator=self._generator)) % count
        output = torch.randint(weights.shape[1], (len(rows),), generator=self._generator)
        row = torch.arange(len(rows))
        rows[row, inputs[first]] = (_CANCELLING * weights[second, output]).to(rows.dtype)
        rows[row, inputs[second]] = (-_CANCELLING * weights[first, output]).to(rows.dtype)


def _company(width: int, dtype: torch.dtype) -> Tensor:
    """Three rows: zeros, huge and tiny numbers in turn, NaN."""
    rows = torch.zeros(_NUM_ALIENS, width, dtype=dtype)
    rows[1, ::2], rows[1, 1::2] = torch.finfo(dtype).max, torch.finfo(dtype).tiny
    rows[2] = float("nan")
    return rows


def _bits(values: Tensor) -> Tensor:
    """As integers, so that NaN equals itself and zeros have a sign."""
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return values.contiguous().view(integers[values.element_size()])
