"""Sampling parameters as every part of the system sees them, with their rules."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from pdserve.errors import InvalidRequest
from pdserve.fields import UINT32, check_fields, setting
from pdserve.structure import Structure

MAX_LISTED_IDS = 16384  # allowed or banned; every attempt carries them


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

    The defaults are "off". Lists of ids are checked against the vocabulary by the request.
    logit_bias                 (id, bias), ascending ids
    structure                  what the text must be; None = anything
    logprobs, prompt_logprobs  None = none; k = the token's own and the k most likely ones'
    """

    # fmt: off
    temperature: float = setting(1.0, "0 = greedy", least=0, most=math.inf)
    top_k: int = setting(0, "only the N most likely tokens", least=0, most=UINT32, means="off")
    top_p: float = setting(1.0, "only the most likely tokens of this sum", above=0, most=1, means="off")
    min_p: float = setting(0.0, "only tokens F times as likely as the best one", least=0, most=1, means="off")
    typical_p: float = setting(1.0, "only the most typical tokens of this sum", above=0, most=1, means="off")
    repetition_penalty: float = setting(
        1.0, "above 1: against tokens of the prompt and the output", above=0, most=math.inf, means="off")
    presence_penalty: float = setting(0.0, "above 0: against tokens of the output", least=-2, most=2)
    frequency_penalty: float = setting(0.0, "above 0: the same, for each time they occur", least=-2, most=2)
    logit_bias: tuple[tuple[int, float], ...] = setting(
        (), "add F to the logit of this id", max_items=1024, least=-100, most=100, means="none")
    allowed_token_ids: tuple[int, ...] = setting(
        (), "only these ids", max_items=MAX_LISTED_IDS, means="all", flag="--allowed-token-id")
    banned_token_ids: tuple[int, ...] = setting(
        (), "never this id", max_items=MAX_LISTED_IDS, means="none", flag="--banned-token-id")
    bad_words: tuple[str, ...] = setting(
        (), "never this word", max_items=128, characters=(1, 128), means="none", flag="--bad-word")
    min_tokens: int = setting(0, "nothing ends the text before so many tokens", least=0, most=UINT32)
    max_tokens: int | None = setting(
        None, "most tokens to generate; 0 = only the prompt is computed", least=0, most=UINT32,
        means="what is left of the window")
    stop: tuple[str, ...] = setting((), "end before this text", max_items=16, characters=(1, 256), means="none")
    include_stop: bool = setting(False, "show the stop text, or the stop id's text")
    stop_token_ids: tuple[int, ...] = setting(
        (), "end with this id", max_items=128, means="none", flag="--stop-token-id")
    ignore_eos: bool = setting(False, "go on after the end-of-sequence token")
    keep_special_tokens: bool = setting(False, "show special tokens of the output in its text")
    structure: Structure | None = None
    logprobs: int | None = setting(
        None, "log probability of each token and of the N most likely ones", least=0, most=20, means="none")
    prompt_logprobs: int | None = setting(None, "the same for the prompt's tokens", least=0, most=20, means="none")
    # fmt: on

    @property
    def only_prompt(self) -> bool:
        """Whether nothing is wanted but what is computed of the prompt."""
        return self.max_tokens == 0

    def check(self) -> None:
        """Every rule that needs no model. Raises InvalidRequest naming the field, the limit and the value."""
        check_fields(self)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                "min_tokens must not exceed max_tokens", limit=self.max_tokens, value=self.min_tokens
            )
        for place, word in enumerate(self.bad_words):
            if not word.strip():
                raise InvalidRequest(f"bad_words[{place}] must not be blank", value=repr(word))
        if self.allowed_token_ids and not set(self.allowed_token_ids) - set(self.banned_token_ids):
            raise InvalidRequest(
                "banned_token_ids rule out all of allowed_token_ids", value=len(self.allowed_token_ids)
            )
        if self.structure is not None:
            self.structure.check()


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probability of a token and of the most likely ones, (id, logprob), best first.

    Natural logarithms of the model's own probabilities, before any setting changes them; values that a float32 holds.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleKey:
    """Everything the sampler of one choice knows besides ids: with these and the ids it is a pure function.

    max_tokens    resolved: an attempt's bound on generated tokens, counted from num_prompt_tokens; at least 1, as who
                  computes a prompt also samples
    bad_word_ids  params.bad_words as ids, each one a sequence that must not be completed
    """

    params: SamplingParams
    seed: int
    choice: int
    eos_token_ids: tuple[int, ...]
    max_tokens: int
    bad_word_ids: tuple[tuple[int, ...], ...] = ()

    def next_is_last(self, num_tokens: int, num_prompt_tokens: int) -> bool:
        """Whether the token after so many ends the choice, whichever it is: nobody will use the KV before it."""
        return num_tokens + 1 >= num_prompt_tokens + self.max_tokens


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
