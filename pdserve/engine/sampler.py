"""From logits to a token: what the request changes, the filters, then one draw that only (seed, choice, position)
decides.

Each row is a pure function of its logits and its `SampleSpec`, whatever else is in the batch. Rows that ask for
nothing but temperature go together; greedy ones cost an argmax.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pdserve.engine import philox
from pdserve.engine.port import RowOutput, SampleSpec, nothing_left
from pdserve.engine.row_scan import TORCH_SCAN, RowScan
from pdserve.engine.token_changes import NEVER, changed, changes_nothing
from pdserve.engine.token_filters import filtered, narrowed
from pdserve.engine.token_scores import token_logprobs
from pdserve.errors import RowFailed
from pdserve.sampling import SamplingParams, TokenLogprobs, forbidden_now

_ROWS_AT_ONCE = 4  # of float64 probabilities over the vocabulary: more take longer, as they leave the cache


def sample(logits: Tensor, specs: Sequence[SampleSpec], scan: RowScan = TORCH_SCAN) -> list[RowOutput]:
    """One token a row, or the error that ends that row only.

    logits  [rows, vocabulary] float32, not changed
    specs   one a row
    scan    looks through rows; whichever does, the tokens are the same
    """
    if not specs:
        return []
    best, sound = scan.best(logits)
    tokens: dict[int, int | RowFailed] = {}
    plain: list[int] = []
    for row, spec in enumerate(specs):
        if not sound[row]:
            tokens[row] = RowFailed("logits are not finite", position=len(spec.ids))
        elif not changes_nothing(spec, forbidden_now(spec.key, spec.ids, spec.num_prompt_tokens)):
            tokens[row] = _sample_changed(logits[row], spec)
        elif spec.key.params.temperature == 0:
            tokens[row] = best[row]
        elif _filters(spec.key.params):
            found = narrowed(scan.shortlist(logits[row], best[row], spec.key.params), spec.key.params)
            tokens[row] = found.draw(_uniform(spec))
        else:
            plain.append(row)
    for first in range(0, len(plain), _ROWS_AT_ONCE):
        rows = plain[first : first + _ROWS_AT_ONCE]
        drawn = _draw_plain(logits.index_select(0, torch.tensor(rows)), [specs[row] for row in rows])
        tokens.update(zip(rows, drawn, strict=True))
    return [_output(logits, row, spec, tokens[row]) for row, spec in enumerate(specs)]


def _filters(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1 or params.min_p > 0 or params.typical_p < 1


def _draw_plain(logits: Tensor, specs: Sequence[SampleSpec]) -> list[int]:
    """Rows without filters. Bit for bit what `filtered` and its draw would give for each of them alone."""
    wide = logits.to(torch.float64)
    temperatures = torch.tensor([spec.key.params.temperature for spec in specs], dtype=torch.float64)
    wide.sub_(wide.amax(dim=-1, keepdim=True)).div_(temperatures.unsqueeze(1))
    probabilities = torch.softmax(wide, dim=-1)
    us = torch.tensor([_uniform(spec) for spec in specs], dtype=torch.float64)
    reached = torch.cumsum(probabilities, dim=-1, out=wide)
    places = torch.searchsorted(reached, us.unsqueeze(1), right=True).squeeze(1)
    return [
        place if place < logits.shape[1] else int(torch.nonzero(probabilities[row])[-1])
        for row, place in enumerate(places.tolist())
    ]


def _sample_changed(logits: Tensor, spec: SampleSpec) -> int | RowFailed:
    try:
        shaped = changed(logits, spec)
    except (IndexError, RuntimeError) as error:  # an id of the sequence that the vocabulary hasn't
        return RowFailed("the sampler failed", position=len(spec.ids), cause=str(error)[:200])
    if spec.key.params.temperature > 0:
        candidates = filtered(shaped, spec.key.params)
        return nothing_left(spec, spec.position) if candidates is None else candidates.draw(_uniform(spec))
    token_id = int(shaped.argmax())
    return nothing_left(spec, spec.position) if shaped[token_id] == NEVER else token_id


def _uniform(spec: SampleSpec) -> float:
    return philox.uniform(spec.key.seed, len(spec.ids), spec.key.choice)


def _output(logits: Tensor, row: int, spec: SampleSpec, token: int | RowFailed) -> RowOutput:
    if isinstance(token, RowFailed):
        return RowOutput(error=token)
    top = spec.key.params.logprobs
    if top is None:
        return RowOutput(token)
    logprobs: TokenLogprobs
    (logprobs,) = token_logprobs(logits[row : row + 1], [token], top)
    return RowOutput(token, logprobs)
