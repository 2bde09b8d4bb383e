"""What docs/sampling.md says, in plain NumPy and Python, one token at a time: written to be read, not to be fast."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from pdserve.sampling import SampleKey

Floats = npt.NDArray[np.float64]
NEAR = 1e-9  # a sum or threshold so close to its limit may fall to either side of it


class TooClose(Exception):
    """The definition holds, but rounding decides: no example for a test."""


def changed_logits(
    logits: Sequence[float],
    key: SampleKey,
    ids: Sequence[int],
    num_prompt: int,
    mask: set[int] | None = None,
) -> list[float]:
    """After mask, allowed and forbidden ids, biases and penalties, in this order."""
    params = key.params
    output = ids[num_prompt:]
    counts = Counter(output)
    result: list[float] = []
    for token, logit in enumerate(logits):
        value = logit
        if mask is not None and token not in mask:
            value = -math.inf
        if params.allowed_token_ids and token not in params.allowed_token_ids:
            value = -math.inf
        if token in params.banned_token_ids or _completes_a_word(key, ids, token):
            value = -math.inf
        if len(output) < params.min_tokens and token in params.stop_token_ids:
            value = -math.inf
        if len(output) < params.min_tokens and not params.ignore_eos and token in key.eos_token_ids:
            value = -math.inf
        value += dict(params.logit_bias).get(token, 0.0)
        if token in ids:
            value = value * params.repetition_penalty if value < 0 else value / params.repetition_penalty
        value -= params.frequency_penalty * counts[token]
        value -= params.presence_penalty * (counts[token] > 0)
        result.append(value)
    return result


def _completes_a_word(key: SampleKey, ids: Sequence[int], token: int) -> bool:
    now = [*ids, token]
    return any(tuple(now[-len(word) :]) == word for word in key.bad_word_ids)


def probabilities(logits: Sequence[float], key: SampleKey) -> Floats | None:
    """After temperature, min-p, top-k, top-p, typical-p; None if nothing is left. temperature above 0."""
    params = key.params
    if max(logits) == -math.inf:
        return None
    left = {token: logit / params.temperature for token, logit in enumerate(logits) if logit > -math.inf}
    if params.min_p > 0:
        left = _min_p(left, params.min_p)
    if params.top_k > 0:
        limit = sorted(left.values(), reverse=True)[: params.top_k][-1]
        left = {token: logit for token, logit in left.items() if logit >= limit}
    if params.top_p < 1:
        left = _top_p(left, params.top_p)
    if params.typical_p < 1:
        left = _typical_p(left, params.typical_p)
    result = np.zeros(len(logits))
    for token, probability in _softmax(left).items():
        result[token] = probability
    return result


def _softmax(logits: dict[int, float]) -> dict[int, float]:
    highest = max(logits.values())
    weights = {token: math.exp(logit - highest) for token, logit in logits.items()}
    total = math.fsum(weights.values())
    return {token: weight / total for token, weight in weights.items()}


def _min_p(logits: dict[int, float], min_p: float) -> dict[int, float]:
    likely = _softmax(logits)
    limit = min_p * max(likely.values())
    _not_close(abs(each / limit - 1) for each in likely.values() if min_p < 1)
    return {token: logit for token, logit in logits.items() if likely[token] >= limit * (1 - NEAR)}


def _top_p(logits: dict[int, float], top_p: float) -> dict[int, float]:
    likely = _softmax(logits)
    kept: list[int] = []
    reached = 0.0
    for token in sorted(logits, key=lambda token: (-logits[token], token)):
        if kept and reached >= top_p:
            break
        kept.append(token)
        reached += likely[token]
        _not_close([abs(reached - top_p)])
    return {token: logits[token] for token in sorted(kept)}


def _typical_p(logits: dict[int, float], typical_p: float) -> dict[int, float]:
    likely = {token: each for token, each in _softmax(logits).items() if each > 0}
    entropy = -math.fsum(each * math.log(each) for each in likely.values())
    distance = {token: abs(-math.log(each) - entropy) for token, each in likely.items()}
    reached, last = 0.0, 0.0
    for token in sorted(likely, key=lambda token: (distance[token], token)):
        last = distance[token]
        reached += likely[token]
        _not_close([abs(reached - typical_p)])
        if reached >= typical_p:
            break
    _not_close(
        abs(each - last) for token, each in distance.items() if likely[token] != _of(last, distance, likely)
    )
    return {token: logits[token] for token in likely if distance[token] <= last + NEAR}


def _of(last: float, distance: dict[int, float], likely: dict[int, float]) -> float:
    """The probability of the token at that distance."""
    return next(likely[token] for token, each in distance.items() if each == last)


def _not_close(distances: Iterable[float]) -> None:
    if any(distance < NEAR for distance in distances):
        raise TooClose
