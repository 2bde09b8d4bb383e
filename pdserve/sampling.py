"""Sampling parameters as every part of the system sees them, validated where they enter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from pdserve.structure import Structure


class FinishReason(Enum):
    """Why a choice ended; `value` is the word users read."""

    LENGTH = "length"
    EOS = "eos"
    STOP_TOKEN = "stop_token"
    STOP_TEXT = "stop_text"
    STRUCTURE = "structure"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """What a request asks of the sampler and of the end of its text; docs/sampling.md defines every field.

    The defaults are "off". temperature 0 is greedy. max_tokens None = what is left of the window.
    logit_bias         (id, bias), ascending ids
    allowed_token_ids  () = all
    structure          what the text must be; None = anything
    logprobs, prompt_logprobs  None = none; k = the token's own and the k most likely ones'
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    banned_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    min_tokens: int = 0
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    structure: Structure | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleKey:
    """Everything the sampler of one choice knows besides ids: with these and the ids it is a pure function.

    max_tokens    resolved: an attempt's bound on generated tokens, counted from num_prompt_tokens
    bad_word_ids  params.bad_words as ids, each one a sequence that must not be completed
    """

    params: SamplingParams
    seed: int
    choice: int
    eos_token_ids: tuple[int, ...]
    max_tokens: int
    bad_word_ids: tuple[tuple[int, ...], ...] = ()


def finish_reason(key: SampleKey, token_id: int, num_generated: int) -> FinishReason | None:
    """Whether this token ends its choice.

    num_generated  generated tokens, this one included (num ids − num_prompt_tokens)
    Stop strings are the router's, a structure's own end is `pdserve.token_matcher.finish_by`'s; here end-of-sequence,
    stop ids, then length.
    """
    if num_generated >= key.params.min_tokens:
        if not key.params.ignore_eos and token_id in key.eos_token_ids:
            return FinishReason.EOS
        if token_id in key.params.stop_token_ids:
            return FinishReason.STOP_TOKEN
    if num_generated >= key.max_tokens:
        return FinishReason.LENGTH
    return None


def end_token_ids(key: SampleKey) -> tuple[int, ...]:
    """Ids that end the text; a structure allows them where its text may end."""
    ends = () if key.params.ignore_eos else key.eos_token_ids
    return (*ends, *key.params.stop_token_ids)


def forbidden_until_min(key: SampleKey, num_generated: int) -> Sequence[int]:
    """Ids that may not be sampled yet because `min_tokens` isn't reached; num_generated before this sample."""
    if num_generated >= key.params.min_tokens:
        return ()
    return end_token_ids(key)


def forbidden_now(key: SampleKey, ids: Sequence[int], num_prompt_tokens: int) -> Sequence[int]:
    """Ids that may not follow `ids`: ends before min_tokens, banned ids, and what would complete a bad word.

    ids  prompt and tokens so far; a bad word may begin in the prompt
    What `allowed_token_ids` leaves out is not among them.
    """
    forbidden = forbidden_until_min(key, len(ids) - num_prompt_tokens)
    if key.params.banned_token_ids:
        forbidden = (*forbidden, *key.params.banned_token_ids)
    if key.bad_word_ids:
        forbidden = (*forbidden, *_bad_word_ends(key.bad_word_ids, ids))
    return forbidden


def _bad_word_ends(words: Sequence[tuple[int, ...]], ids: Sequence[int]) -> list[int]:
    """The last id of each word whose other ids are the last of `ids`."""
    return [
        word[-1]
        for word in words
        if len(word) <= len(ids) + 1 and tuple(ids[len(ids) + 1 - len(word) :]) == word[:-1]
    ]
