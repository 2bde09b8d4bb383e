"""What a request changes about the logits before the filters: ids ruled out, biases, penalties. docs/sampling.md
defines each of them and their order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pdserve.engine.port import SampleSpec
from pdserve.sampling import SamplingParams, forbidden_now
from pdserve.token_mask import to_flags

NEVER = float("-inf")


def changes_nothing(spec: SampleSpec, forbidden: Sequence[int]) -> bool:
    """Whether `changed` would give the logits as they are; forbidden: as `forbidden_now` says of this spec."""
    params = spec.key.params
    return not (
        forbidden
        or spec.mask is not None
        or params.allowed_token_ids
        or params.logit_bias
        or params.repetition_penalty != 1
        or params.presence_penalty
        or params.frequency_penalty
    )


def changed(logits: Tensor, spec: SampleSpec) -> Tensor:
    """The logits to sample from, a new tensor: grammar mask, allowed ids, forbidden ids, biases, then penalties.

    logits   [vocabulary] float32
    returns  [vocabulary] float64, −inf where ruled out
    """
    params = spec.key.params
    result = logits.to(torch.float64)
    vocab_size = len(result)
    if spec.mask is not None:
        result[~torch.from_numpy(to_flags(spec.mask, vocab_size))] = NEVER
    if params.allowed_token_ids:
        result = _only(result, _inside(params.allowed_token_ids, vocab_size))
    forbidden = _inside(forbidden_now(spec.key, spec.ids, spec.num_prompt_tokens), vocab_size)
    if forbidden:
        result[forbidden] = NEVER
    for token_id, bias in params.logit_bias:
        if token_id < vocab_size:
            result[token_id] += bias
    penalise_(result, params, spec.ids, spec.num_prompt_tokens)
    return result


def penalise_(logits: Tensor, params: SamplingParams, ids: Sequence[int], num_prompt_tokens: int) -> None:
    """Repetition penalty over prompt and output, then frequency and presence penalty over the output.

    logits  [vocabulary] float64, changed in place
    """
    if params.repetition_penalty != 1:
        seen = torch.unique(torch.tensor(ids, dtype=torch.int64))
        values = logits.index_select(0, seen)
        factor = params.repetition_penalty
        logits[seen] = torch.where(values < 0, values * factor, values / factor)
    if params.frequency_penalty or params.presence_penalty:
        output = torch.tensor(ids[num_prompt_tokens:], dtype=torch.int64)
        made, counts = torch.unique(output, return_counts=True)
        logits[made] -= params.frequency_penalty * counts.to(torch.float64) + params.presence_penalty


def _only(logits: Tensor, ids: Sequence[int]) -> Tensor:
    allowed = torch.tensor(ids, dtype=torch.int64)
    return torch.full_like(logits, NEVER).index_copy_(0, allowed, logits.index_select(0, allowed))


def _inside(ids: Sequence[int], vocab_size: int) -> list[int]:
    """Ids that there are: one that isn't can't be sampled anyway."""
    return [token_id for token_id in ids if 0 <= token_id < vocab_size]
