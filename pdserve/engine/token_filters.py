"""Filters: which tokens are left to draw from. docs/sampling.md defines each of them and their order.

A filter takes logits of the tokens that are left, float64 [n], and gives the places of those that it keeps, ascending.
All keep at least the best token (typical_p: the most typical one).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pdserve.sampling import SamplingParams

NEVER = float("-inf")


@dataclass(frozen=True, slots=True)
class Shortlist:
    """What the filters that look at each token by itself have left, in ascending order of ids.

    ids   [n] int64; None = all of the vocabulary
    left  [n] float64, (logit − the largest) / temperature
    """

    ids: Tensor | None
    left: Tensor


@dataclass(frozen=True, slots=True)
class Candidates:
    """Tokens that may be drawn, in ascending order of ids.

    ids            [n] int64; None = all of the vocabulary
    probabilities  [n] float64
    """

    ids: Tensor | None
    probabilities: Tensor

    def draw(self, u: float) -> int:
        """The first id whose cumulative probability exceeds u; else the last with p > 0."""
        place = draw(self.probabilities, u)
        return place if self.ids is None else int(self.ids[place])


def filtered(logits: Tensor, params: SamplingParams) -> Candidates | None:
    """Temperature, then min-p, top-k, top-p and typical-p; None if no token is left.

    logits  [vocabulary] float64, −inf where ruled out; temperature above 0
    """
    highest = logits.max()
    if highest == NEVER:
        return None
    # Shifted first, so that a tiny temperature can't overflow: the best token has weight exp(0).
    return narrowed(shortlist((logits - highest) / params.temperature, params), params)


def shortlist(left: Tensor, params: SamplingParams) -> Shortlist:
    """What min-p, then top-k keep.

    left  [vocabulary] float64, of which the largest is 0
    """
    ids: Tensor | None = None
    if params.min_p > 0:
        ids = min_p_places(left, params.min_p)
        left = left.index_select(0, ids)
    if 0 < params.top_k < len(left):
        places = top_k_places(left, params.top_k)
        ids, left = _picked(ids, places), left.index_select(0, places)
    return Shortlist(ids, left)


def narrowed(found: Shortlist, params: SamplingParams) -> Candidates:
    """What top-p, then typical-p keep of these."""
    ids, left = found.ids, found.left
    for is_on, places_of, share in (
        (params.top_p < 1, top_p_places, params.top_p),
        (params.typical_p < 1, typical_p_places, params.typical_p),
    ):
        if is_on:
            places = places_of(left, share)
            ids, left = _picked(ids, places), left.index_select(0, places)
    return Candidates(ids, torch.softmax(left, dim=-1))


def _picked(ids: Tensor | None, places: Tensor) -> Tensor:
    return places if ids is None else ids.index_select(0, places)


def min_p_places(logits: Tensor, min_p: float) -> Tensor:
    """At least min_p times as likely as the best one."""
    return _places(logits >= logits.max() + math.log(min_p))


def top_k_places(logits: Tensor, top_k: int) -> Tensor:
    """The k best, and those that equal the k-th."""
    return _places(logits >= torch.topk(logits, top_k).values[-1])


def top_p_places(logits: Tensor, top_p: float) -> Tensor:
    """The fewest best tokens whose probabilities reach top_p; of equals the lower id goes first."""
    probabilities = torch.softmax(logits, dim=-1)
    # All that are less likely than this together don't reach 1 − top_p: they needn't be sorted.
    places = _places(probabilities >= (1 - top_p) / len(logits))
    order = torch.sort(logits.index_select(0, places), descending=True, stable=True).indices
    ordered = places.index_select(0, order)
    reached = probabilities.index_select(0, ordered).cumsum(dim=-1)
    count = 1 + int((reached[:-1] < top_p).sum())
    return torch.sort(ordered[:count]).values


def typical_p_places(logits: Tensor, typical_p: float) -> Tensor:
    """The fewest tokens whose probabilities reach typical_p, nearest to the expected information first; with equals.

    Source: C. Meister et al., "Locally Typical Sampling", 2022, https://arxiv.org/abs/2202.00666
    """
    logprobs = torch.log_softmax(logits, dim=-1)
    probabilities = logprobs.exp()
    entropy = -torch.where(probabilities > 0, probabilities * logprobs, 0.0).sum()
    distance = (-logprobs - entropy).abs()
    # As for top-p the least likely needn't be sorted, unless one of them is nearer than the farthest that is kept.
    rare = probabilities < (1 - typical_p) / len(logits)
    likely = _places(~rare)
    last = _last_distance(distance.index_select(0, likely), probabilities.index_select(0, likely), typical_p)
    if len(likely) < len(logits) and last >= torch.where(rare, distance, torch.inf).min():
        last = _last_distance(distance, probabilities, typical_p)
    return _places(distance <= last)


def _last_distance(distance: Tensor, probabilities: Tensor, typical_p: float) -> Tensor:
    """Of the token with which the nearest ones reach typical_p; the farthest if they don't."""
    ordered, order = torch.sort(distance, stable=True)
    reached = probabilities.index_select(0, order).cumsum(dim=-1)
    return ordered[min(int((reached < typical_p).sum()), len(ordered) - 1)]


def draw(probabilities: Tensor, u: float) -> int:
    """The first place, in ascending order, whose cumulative probability exceeds u; else the last with p > 0.

    probabilities  [n] float64
    """
    cumulative = probabilities.cumsum(dim=-1)
    place = int(torch.searchsorted(cumulative, u, right=True))
    if place < probabilities.shape[0]:
        return place
    return int(torch.nonzero(probabilities)[-1])


def _places(kept: Tensor) -> Tensor:
    # Five times as fast as torch.nonzero on a whole vocabulary.
    return torch.from_numpy(np.flatnonzero(kept.numpy()))
