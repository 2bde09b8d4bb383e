"""The sampler beside transformers' logits processors, on fixed logits: the same tokens are left, equally likely.

Of what they don't have (frequency and presence penalty) or define otherwise (min_tokens also rules stop ids out), the
definition is tests/property/sampling/oracle.py alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from pdserve.engine.port import SampleSpec
from pdserve.engine.token_changes import changed
from pdserve.engine.token_filters import filtered
from pdserve.sampling import SampleKey, SamplingParams

VOCAB = 800
PROMPT = (5, 17, 17, 400, 3)
OUTPUT = (17, 61, 62, 5)
EOS = 2
WORDS = ((61,), (62, 5, 90), (5, 91), (17, 92), (400, 3, 93), (3, 17, 61, 62, 5, 94))


def logits(seed: int) -> Tensor:
    """[vocabulary] float32, no two alike."""
    drawn = torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    assert len(set(drawn.tolist())) == VOCAB
    return drawn


def ours(row: Tensor, params: SamplingParams, bad_words: tuple[tuple[int, ...], ...] = ()) -> Tensor:
    key = SampleKey(
        params=params, seed=1, choice=0, eos_token_ids=(EOS,), max_tokens=99, bad_word_ids=bad_words
    )
    candidates = filtered(changed(row, SampleSpec(key, PROMPT + OUTPUT, len(PROMPT))), params)
    assert candidates is not None
    if candidates.ids is None:
        return candidates.probabilities
    dense = torch.zeros(VOCAB, dtype=torch.float64)
    return dense.index_copy(0, candidates.ids, candidates.probabilities)


def theirs(row: Tensor, *processors: Any) -> Tensor:
    ids = torch.tensor([PROMPT + OUTPUT])
    given = row.unsqueeze(0).to(torch.float64)
    for processor in processors:
        given = processor(ids, given)
    return torch.softmax(given[0], dim=-1)


ONE: dict[str, tuple[SamplingParams, Callable[[], list[Any]]]] = {
    "temperature": (SamplingParams(temperature=0.6), lambda: [TemperatureLogitsWarper(0.6)]),
    "top_k": (SamplingParams(top_k=40), lambda: [TopKLogitsWarper(40)]),
    "top_p": (SamplingParams(top_p=0.83), lambda: [TopPLogitsWarper(0.83)]),
    "min_p": (SamplingParams(min_p=0.02), lambda: [MinPLogitsWarper(0.02)]),
    "typical_p": (SamplingParams(typical_p=0.4), lambda: [TypicalLogitsWarper(0.4)]),
    "typical_p, wide": (SamplingParams(typical_p=0.95), lambda: [TypicalLogitsWarper(0.95)]),
    "repetition": (SamplingParams(repetition_penalty=1.7), lambda: [RepetitionPenaltyLogitsProcessor(1.7)]),
    "reward": (SamplingParams(repetition_penalty=0.6), lambda: [RepetitionPenaltyLogitsProcessor(0.6)]),
    "bias": (
        SamplingParams(logit_bias=((7, 4.0), (17, -2.5))),
        lambda: [SequenceBiasLogitsProcessor([[[7], 4.0], [[17], -2.5]])],
    ),
    "banned": (
        SamplingParams(banned_token_ids=(1, 17, 799)),
        lambda: [SuppressTokensLogitsProcessor([1, 17, 799])],
    ),
    "min_tokens": (
        SamplingParams(min_tokens=5),
        lambda: [MinNewTokensLengthLogitsProcessor(len(PROMPT), 5, EOS)],
    ),
    "min_tokens, reached": (
        SamplingParams(min_tokens=4),
        lambda: [MinNewTokensLengthLogitsProcessor(len(PROMPT), 4, EOS)],
    ),
}


@pytest.mark.parametrize("name", ONE)
def test_one_setting(name: str) -> None:
    params, processors = ONE[name]
    for seed in range(8):
        row = logits(seed)
        torch.testing.assert_close(ours(row, params), theirs(row, *processors()), rtol=1e-10, atol=1e-13)


def test_bad_words() -> None:
    """Of any length; some have just begun, one of them in the prompt."""
    for seed in range(8):
        row = logits(seed)
        got = ours(row, SamplingParams(), WORDS)
        want = theirs(row, NoBadWordsLogitsProcessor([list(word) for word in WORDS], EOS))
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-13)
        assert set(torch.nonzero(got == 0).squeeze(1).tolist()) == {61, 90, 91, 94}


def test_all_together_in_our_order() -> None:
    params = SamplingParams(
        temperature=0.8,
        min_p=0.001,
        top_k=60,
        top_p=0.97,
        typical_p=0.9,
        repetition_penalty=1.2,
        logit_bias=((61, 3.0),),
        banned_token_ids=(10, 11),
    )
    for seed in range(20):
        row = logits(seed)
        want = theirs(
            row,
            SuppressTokensLogitsProcessor([10, 11]),
            SequenceBiasLogitsProcessor([[[61], 3.0]]),
            RepetitionPenaltyLogitsProcessor(1.2),
            TemperatureLogitsWarper(0.8),
            MinPLogitsWarper(0.001),
            TopKLogitsWarper(60),
            TopPLogitsWarper(0.97),
            TypicalLogitsWarper(0.9),
        )
        torch.testing.assert_close(ours(row, params), want, rtol=1e-10, atol=1e-13)
        assert not torch.equal(ours(row, replace(params, typical_p=1.0)), want)
