"""Sampling parameters as every part of the system sees them, validated where they enter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class FinishReason(Enum):
    """Why a choice ended; `value` is the word users read."""

    LENGTH = "length"
    EOS = "eos"
    STOP_TOKEN = "stop_token"
    STOP_TEXT = "stop_text"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """What a request asks of the sampler and of the end of its text.

    temperature 0 is greedy; top_k 0 and top_p 1 are off. max_tokens None = what is left of the window.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_tokens: int = 0
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleKey:
    """Everything the sampler of one choice knows besides ids: with these and the ids it is a pure function.

    max_tokens is resolved: an attempt's bound on generated tokens, counted from num_prompt_tokens.
    """

    params: SamplingParams
    seed: int
    choice: int
    eos_token_ids: tuple[int, ...]
    max_tokens: int


def finish_reason(key: SampleKey, token_id: int, num_generated: int) -> FinishReason | None:
    """Whether this token ends its choice.

    num_generated  generated tokens, this one included (num ids − num_prompt_tokens)
    Stop strings are the router's; here end-of-sequence, stop ids, then length.
    """
    if num_generated >= key.params.min_tokens:
        if not key.params.ignore_eos and token_id in key.eos_token_ids:
            return FinishReason.EOS
        if token_id in key.params.stop_token_ids:
            return FinishReason.STOP_TOKEN
    if num_generated >= key.max_tokens:
        return FinishReason.LENGTH
    return None


def forbidden_until_min(key: SampleKey, num_generated: int) -> Sequence[int]:
    """Ids that may not be sampled yet because `min_tokens` isn't reached; num_generated before this sample."""
    if num_generated >= key.params.min_tokens:
        return ()
    ends = () if key.params.ignore_eos else key.eos_token_ids
    return (*ends, *key.params.stop_token_ids)
