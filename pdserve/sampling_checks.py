"""What a request may ask of the sampler: every value that is refused is refused with the limit and the value."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pdserve.errors import InvalidRequest
from pdserve.rpc.params import params_from
from pdserve.rpc.v1 import inference_pb2 as pb
from pdserve.sampling import SamplingParams
from pdserve.structure import Structure, StructureKind

MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 256
MAX_STOP_TOKEN_IDS = 128
MAX_LISTED_TOKEN_IDS = 16384  # allowed or banned; every attempt carries them
MAX_LOGIT_BIASES = 1024
MAX_LOGIT_BIAS = 100.0
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARACTERS = 128
MAX_PENALTY = 2.0  # presence and frequency
MAX_LOGPROBS = 20
MAX_STRUCTURE_BYTES = 64 << 10  # of a schema, regex or grammar, or of all choices; every attempt carries them
MAX_CHOICES = 1024
MAX_CHOICE_CHARACTERS = 1024


def checked_params(msg: pb.SamplingParams, vocab_size: int | None) -> SamplingParams:
    """The parameters of a request, or InvalidRequest.

    vocab_size  token ids must be below it, if given
    """
    params = params_from(msg)
    _check_filters(params)
    _check_penalties(params)
    _check_ends(params)
    _check_words(params)
    if params.structure is not None:
        check_structure(params.structure)
    for name in ("logprobs", "prompt_logprobs"):
        count = getattr(params, name)
        if count is not None and count > MAX_LOGPROBS:
            raise InvalidRequest(f"{name} out of range", limit=f"0 to {MAX_LOGPROBS}", value=count)
    for name, most in (
        ("stop_token_ids", MAX_STOP_TOKEN_IDS),
        ("allowed_token_ids", MAX_LISTED_TOKEN_IDS),
        ("banned_token_ids", MAX_LISTED_TOKEN_IDS),
    ):
        ids = getattr(params, name)
        if len(ids) > most:
            raise InvalidRequest(f"too many {name}", limit=most, value=len(ids))
        checked_ids(ids, name, vocab_size)
    return params


def checked_ids(ids: Sequence[int], field: str, vocab_size: int | None) -> tuple[int, ...]:
    """Ids of a request, inside the vocabulary if its size is known; else InvalidRequest."""
    if vocab_size is not None and ids and max(ids) >= vocab_size:
        raise InvalidRequest(
            f"{field} holds an id outside the vocabulary", limit=vocab_size - 1, value=max(ids)
        )
    return tuple(ids)


def check_structure(structure: Structure) -> None:
    """Size and form, before anything is compiled. Raises InvalidRequest."""
    name = structure.kind.value
    if structure.num_bytes > MAX_STRUCTURE_BYTES:
        raise InvalidRequest(
            f"{name} is too large", limit=f"{MAX_STRUCTURE_BYTES} bytes", value=structure.num_bytes
        )
    if structure.kind is StructureKind.CHOICES:
        _check_choices(structure.texts)
    elif structure.kind is not StructureKind.JSON_OBJECT and not structure.text.strip():
        raise InvalidRequest(f"{name} must not be empty")


def _check_choices(texts: Sequence[str]) -> None:
    if not 1 <= len(texts) <= MAX_CHOICES:
        raise InvalidRequest("number of choices out of range", limit=f"1 to {MAX_CHOICES}", value=len(texts))
    for place, text in enumerate(texts):
        if not 1 <= len(text) <= MAX_CHOICE_CHARACTERS:
            raise InvalidRequest(
                "a choice's length is out of range",
                limit=f"1 to {MAX_CHOICE_CHARACTERS}",
                value=len(text),
                place=place,
            )
        if "\0" in text:
            raise InvalidRequest("a choice must not hold a NUL character", place=place)


def _check_filters(params: SamplingParams) -> None:
    if not (math.isfinite(params.temperature) and params.temperature >= 0):
        raise InvalidRequest("temperature must be finite and 0 or more", value=params.temperature)
    for name in ("top_p", "typical_p"):
        value = getattr(params, name)
        if not 0 < value <= 1:
            raise InvalidRequest(f"{name} must be above 0 and at most 1", value=value)
    if not 0 <= params.min_p <= 1:
        raise InvalidRequest("min_p out of range", limit="0 to 1", value=params.min_p)


def _check_penalties(params: SamplingParams) -> None:
    if not (math.isfinite(params.repetition_penalty) and params.repetition_penalty > 0):
        raise InvalidRequest("repetition_penalty must be finite and above 0", value=params.repetition_penalty)
    for name in ("presence_penalty", "frequency_penalty"):
        value = getattr(params, name)
        if not abs(value) <= MAX_PENALTY:
            raise InvalidRequest(f"{name} out of range", limit=f"±{MAX_PENALTY:g}", value=value)


def _check_ends(params: SamplingParams) -> None:
    if params.max_tokens == 0:
        raise InvalidRequest("max_tokens must be at least 1", value=0)
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise InvalidRequest(
            "min_tokens must not exceed max_tokens", limit=params.max_tokens, value=params.min_tokens
        )
    if len(params.stop) > MAX_STOP_STRINGS:
        raise InvalidRequest("too many stop strings", limit=MAX_STOP_STRINGS, value=len(params.stop))
    for text in params.stop:
        if not 1 <= len(text) <= MAX_STOP_CHARACTERS:
            raise InvalidRequest(
                "a stop string's length is out of range", limit=f"1 to {MAX_STOP_CHARACTERS}", value=len(text)
            )


def _check_words(params: SamplingParams) -> None:
    if len(params.logit_bias) > MAX_LOGIT_BIASES:
        raise InvalidRequest("too many logit_bias", limit=MAX_LOGIT_BIASES, value=len(params.logit_bias))
    for token_id, bias in params.logit_bias:
        if not abs(bias) <= MAX_LOGIT_BIAS:
            raise InvalidRequest(
                "logit_bias out of range", limit=f"±{MAX_LOGIT_BIAS:g}", value=bias, token_id=token_id
            )
    if len(params.bad_words) > MAX_BAD_WORDS:
        raise InvalidRequest("too many bad_words", limit=MAX_BAD_WORDS, value=len(params.bad_words))
    for word in params.bad_words:
        length = len(word.strip())
        if not 1 <= length <= MAX_BAD_WORD_CHARACTERS:
            raise InvalidRequest(
                "a bad word's length is out of range", limit=f"1 to {MAX_BAD_WORD_CHARACTERS}", value=length
            )
    if params.allowed_token_ids and not set(params.allowed_token_ids) - set(params.banned_token_ids):
        raise InvalidRequest(
            "banned_token_ids leave none of allowed_token_ids", value=len(params.allowed_token_ids)
        )
