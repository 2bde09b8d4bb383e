"""Scores of given tokens (`ScoreSpec`): which hidden states they need, and what they become.

Positions go through the head a few at a time: the logits of a whole chunk would be larger than its KV.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from pdserve.engine.port import Row, RowOutput
from pdserve.engine.token_scores import token_logprobs
from pdserve.errors import RowFailed
from pdserve.sampling import TokenLogprobs

_SCORED_AT_ONCE = 32  # positions: 32 MiB of float32 logits with a vocabulary of 262,144

Scores = dict[int, tuple[TokenLogprobs, ...]]
"""Of rows that ask, by their place in the step."""


class ScoreSlice(NamedTuple):
    """Some positions of one row: its place in the step, positions in the row, the ids behind them, `ScoreSpec.top`."""

    place: int
    positions: Sequence[int]
    next_ids: Sequence[int]
    top: int


def slices_of(rows: Sequence[Row]) -> list[ScoreSlice]:
    """What the rows ask for."""
    slices: list[ScoreSlice] = []
    for place, row in enumerate(rows):
        if row.score is None:
            continue
        score = row.score
        for at in range(0, len(score.next_ids), _SCORED_AT_ONCE):
            ids = list(score.next_ids[at : at + _SCORED_AT_ONCE])
            first = score.first + at
            slices.append(ScoreSlice(place, list(range(first, first + len(ids))), ids, score.top))
    return slices


def scores_of(slices: Sequence[ScoreSlice], hidden: Tensor, logits: Callable[[Tensor], Tensor]) -> Scores:
    """hidden: of the slices' positions, one after the other; logits: the model's head."""
    found: Scores = {each.place: () for each in slices}
    begin = 0
    for place, positions, ids, top in slices:
        end = begin + len(positions)
        found[place] += tuple(token_logprobs(logits(hidden[begin:end]), ids, top))
        begin = end
    return found


def with_scores(output: RowOutput, scores: tuple[TokenLogprobs, ...]) -> RowOutput:
    """The output of a row and its scores; a row whose scores aren't finite has failed."""
    if output.error is not None:
        return output
    if not all(math.isfinite(each.logprob) for each in scores):
        return RowOutput(error=RowFailed("logits are not finite"))
    return replace(output, scores=scores)
