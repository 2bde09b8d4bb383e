"""The output head: hidden states to logits."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional

from pdserve.engine.layers import make_linear, soft_cap_
from pdserve.engine.numerics import Precision
from pdserve.engine.parallel.team import Team
from pdserve.engine.row_tiles import RowFunction
from pdserve.engine.stored_matrix import StoredMatrix

# Tokens of a slice: a proof of 4,096 rows over a whole vocabulary would take longer than all the rest of a start.
_SLICE_TOKENS = 2048


class Head:
    """[rows, hidden] → [rows, vocabulary] float32; in deterministic mode slice by slice of the vocabulary.

    Each rank has an equal part of the vocabulary, the last one perhaps a shorter one; the logits are rank 0's.
    """

    def __init__(self, precision: Precision, weight: StoredMatrix, softcap: float, team: Team) -> None:
        """weight [vocabulary, hidden]; softcap 0: none."""
        self._team = team
        self._vocab_size = len(weight)
        self._width = -(-len(weight) // team.shard.size)
        part = team.shard.part(self._width * team.shard.size)
        weight = weight.rows(part.start, min(part.stop, len(weight)))
        size = len(weight) if precision.product_tiles is None else _SLICE_TOKENS
        self._slices = [self._slice(precision, part, softcap) for part in weight.split(size)]

    def __call__(self, x: Tensor) -> Tensor:
        parts = [logits(x) for logits in self._slices]
        own = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        if self._team.shard.size == 1:
            return own
        if missing := self._width - own.shape[1]:
            own = functional.pad(own, (0, missing))
        return self._team.side_by_side(own)[:, : self._vocab_size]

    @staticmethod
    def _slice(precision: Precision, weight: StoredMatrix, softcap: float) -> RowFunction:
        linear = make_linear(precision, weight)
        if not softcap:
            return lambda x: linear(x).to(torch.float32)
        size = len(weight)
        cap_ = precision.rowwise(
            f"soft cap of {size}", functools.partial(soft_cap_, cap=softcap), size, _as_logits
        )
        return lambda x: cap_(linear(x).to(torch.float32))


def _as_logits(rows: Tensor) -> tuple[Tensor, ...]:
    return (rows.to(torch.float32, copy=True),)
