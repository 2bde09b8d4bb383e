"""What only the model can tell about a request: checked after tokenizing, before any reservation."""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.errors import InvalidRequest, UnknownModel
from pdserve.request import GenerateRequest, Limits
from pdserve.rpc.v1 import inference_pb2 as pb
from pdserve.sampling import SampleKey, forbidden_now, forbidden_until_min
from pdserve.token_matcher import TokenMatcher


def read_message(msg: pb.GenerateRequest, limits: Limits) -> GenerateRequest:
    """The request of a message, checked as far as it can be without the model. Raises InvalidRequest."""
    request = GenerateRequest.from_proto(msg, limits)
    request.check(limits)
    return request


def check_model(asked: str, served: str) -> None:
    """Raises UnknownModel if a request names another model than the one that is served."""
    if asked and asked != served:
        raise UnknownModel("this cluster serves another model", asked=asked[:80], served=served)


def check_prompt(request: GenerateRequest, prompt_ids: Sequence[int], limits: Limits) -> None:
    """Raises InvalidRequest for an empty prompt, and for ids outside the vocabulary."""
    if not prompt_ids:
        raise InvalidRequest("the prompt has no tokens")
    request.check_ids(limits)
    if not isinstance(request.input, tuple):
        limits.check_ids("the prompt", prompt_ids)


def check_possible(key: SampleKey, vocab_size: int) -> None:
    """Raises InvalidRequest if every token is ruled out whatever comes."""
    params = key.params
    ruled_out = {*params.banned_token_ids, *(word[0] for word in key.bad_word_ids if len(word) == 1)}
    ruled_out.update(forbidden_until_min(key, 0))
    allowed = params.allowed_token_ids or range(vocab_size)
    if all(token_id in ruled_out for token_id in allowed):
        raise InvalidRequest(
            "no token is left: banned_token_ids, bad_words and, before min_tokens, the ends rule out all allowed ones",
            allowed=len(allowed),
        )


def check_start(key: SampleKey, matcher: TokenMatcher) -> None:
    """Raises InvalidRequest if the request's other settings rule out whatever its structure may begin with."""
    params = key.params
    if not (params.allowed_token_ids or params.banned_token_ids or key.bad_word_ids or params.min_tokens):
        return
    from pdserve.token_mask import ids_of  # here: a router without structures needs no numpy

    left = set(ids_of(matcher.mask())).difference(forbidden_now(key, (), 0))
    if params.allowed_token_ids:
        left.intersection_update(params.allowed_token_ids)
    if not left and params.structure is not None:
        raise InvalidRequest(
            f"no token is left: allowed and banned ids, bad_words and min_tokens rule out all that "
            f"{params.structure.kind.value} may begin with"
        )


def resolve_max_tokens(request: GenerateRequest, num_prompt_tokens: int, window_tokens: int) -> int:
    """The bound on generated tokens: what was asked for, or what is left of the window; at least 1.

    Raises InvalidRequest naming the window and the prompt's length if they, or min_tokens, don't fit.
    """
    max_tokens = request.sampling.max_tokens
    limits = Limits(window_tokens=window_tokens)
    limits.check_fits(num_prompt_tokens, max_tokens)
    resolved = window_tokens - num_prompt_tokens if max_tokens is None else max_tokens
    resolved = max(resolved, 1)  # the first token is sampled, and not shown if none is wanted
    if request.sampling.min_tokens > resolved:
        raise InvalidRequest(
            "min_tokens are more than what is left of the window",
            limit=resolved,
            value=request.sampling.min_tokens,
        )
    for choice in () if request.resume is None else request.resume.choices:
        limits.check_held(len(choice.token_ids), resolved)
    return resolved
