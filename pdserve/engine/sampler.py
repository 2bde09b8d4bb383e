"""From logits to a token: a chain of processors, then one draw that only (seed, choice, position) decides.

Each row is a pure function of its logits and its `SampleSpec`, whatever else is in the batch. A processor takes float64
logits of one row and gives them back with some changed, −inf where a token is ruled out.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pdserve.engine import philox
from pdserve.engine.port import RowOutput, SampleSpec
from pdserve.errors import RowFailed
from pdserve.sampling import forbidden_until_min

_NEVER = float("-inf")


def sample(logits: Tensor, specs: Sequence[SampleSpec]) -> list[RowOutput]:
    """One token a row, or the error that ends that row only.

    logits  [rows, vocabulary] float32, not changed
    specs   one a row
    """
    if not specs:
        return []
    # One pass finds NaN and ±inf in any row: a sum of finite float32 in float64 is finite.
    sound = torch.isfinite(logits.sum(dim=-1, dtype=torch.float64)).tolist()
    best = logits.argmax(dim=-1).tolist()  # the lowest id of equals
    outputs: list[RowOutput] = []
    for row, spec in enumerate(specs):
        if not sound[row]:
            outputs.append(RowOutput(error=RowFailed("logits are not finite", position=len(spec.ids))))
        elif spec.key.params.temperature == 0 and not _forbidden(spec):
            outputs.append(RowOutput(token_id=best[row]))
        else:
            outputs.append(_sample_row(logits[row], spec))
    return outputs


def _sample_row(logits: Tensor, spec: SampleSpec) -> RowOutput:
    shaped = logits.to(torch.float64)
    forbidden = [token for token in _forbidden(spec) if 0 <= token < shaped.shape[0]]
    if forbidden:
        shaped[forbidden] = _NEVER
    params = spec.key.params
    if params.temperature == 0:
        token_id = int(shaped.argmax())
        if shaped[token_id] == _NEVER:
            return RowOutput(error=RowFailed("every token is ruled out", position=len(spec.ids)))
        return RowOutput(token_id=token_id)
    probabilities = distribution(shaped, params.temperature, params.top_k, params.top_p)
    if probabilities is None:
        return RowOutput(error=RowFailed("every token is ruled out", position=len(spec.ids)))
    position = len(spec.ids)
    return RowOutput(token_id=draw(probabilities, philox.uniform(spec.key.seed, position, spec.key.choice)))


def _forbidden(spec: SampleSpec) -> Sequence[int]:
    return forbidden_until_min(spec.key, len(spec.ids) - spec.num_prompt_tokens)


def distribution(logits: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor | None:
    """Probabilities after temperature, then top-k, then top-p; None if no token is left.

    logits   [vocabulary] float64, −inf where ruled out
    returns  [vocabulary] float64
    """
    highest = logits.max()
    if highest == _NEVER:
        return None
    # Shifted first, so that a tiny temperature can't overflow: the best token has weight exp(0).
    shaped = (logits - highest) / temperature
    if 0 < top_k < shaped.shape[0]:
        shaped = keep_top_k(shaped, top_k)
    if top_p < 1.0:
        shaped = keep_top_p(shaped, top_p)
    return torch.softmax(shaped, dim=-1)


def keep_top_k(logits: Tensor, top_k: int) -> Tensor:
    """Rule out all but the k best; ids that equal the k-th stay."""
    smallest = torch.topk(logits, top_k).values[-1]
    return logits.masked_fill(logits < smallest, _NEVER)


def keep_top_p(logits: Tensor, top_p: float) -> Tensor:
    """Keep the fewest best tokens whose probabilities reach top_p; of equals the lower id goes first; one stays."""
    ordered, ids = torch.sort(logits, descending=True, stable=True)
    before = torch.softmax(ordered, dim=-1).cumsum(dim=-1)
    keep = torch.ones_like(before, dtype=torch.bool)
    keep[1:] = before[:-1] < top_p
    return torch.full_like(logits, _NEVER).index_copy_(0, ids[keep], ordered[keep])


def draw(probabilities: Tensor, u: float) -> int:
    """The first id, in ascending order, whose cumulative probability exceeds u; else the last with p > 0.

    probabilities  [vocabulary] float64
    """
    cumulative = probabilities.cumsum(dim=-1)
    token_id = int(torch.searchsorted(cumulative, u, right=True))
    if token_id < probabilities.shape[0]:
        return token_id
    return int(torch.nonzero(probabilities)[-1])
