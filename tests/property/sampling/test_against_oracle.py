"""The sampler's distribution is the documented one, for any settings together, and its draws follow it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings

from pdserve.engine.philox import uniform
from pdserve.engine.port import RowOutput, SampleSpec
from pdserve.engine.sampler import sample
from pdserve.engine.token_changes import changed
from pdserve.engine.token_filters import filtered
from pdserve.errors import RowFailed
from pdserve.sampling import SampleKey, SamplingParams
from pdserve.token_mask import to_mask
from tests.property.sampling.oracle import Floats, TooClose, changed_logits, probabilities
from tests.property.sampling.strategies import Case, cases


def spec_of(case: Case) -> SampleSpec:
    mask = None if case.mask is None else to_mask(sorted(case.mask), len(case.logits))
    return SampleSpec(case.key, case.ids, case.num_prompt, mask)


def wanted(case: Case) -> tuple[list[float], Floats | None]:
    mask = None if case.mask is None else set(case.mask)
    logits = changed_logits(case.logits, case.key, case.ids, case.num_prompt, mask)
    try:
        return logits, probabilities(logits, case.key)
    except TooClose:
        assume(False)
        raise AssertionError from None


def only(logits: torch.Tensor, spec: SampleSpec) -> RowOutput:
    (output,) = sample(logits.unsqueeze(0), [spec])
    return output


@settings(max_examples=200, deadline=None)
@given(cases())
def test_any_settings_together(case: Case) -> None:
    logits, want = wanted(case)
    row = torch.tensor(case.logits, dtype=torch.float32)
    spec = spec_of(case)
    shaped = changed(row, spec)
    np.testing.assert_allclose(shaped.numpy(), logits, rtol=1e-12, atol=1e-12)
    candidates = filtered(shaped, case.key.params)
    if want is None:
        assert candidates is None
        assert isinstance(only(row, spec).error, RowFailed)
        return
    assert candidates is not None
    got = np.zeros(len(logits))
    places = range(len(logits)) if candidates.ids is None else candidates.ids.tolist()
    got[list(places)] = candidates.probabilities.numpy()
    np.testing.assert_allclose(got, want, atol=1e-12)
    token_id = only(row, spec).token_id
    assert token_id is not None
    reached = np.cumsum(want)
    u = uniform(case.key.seed, len(case.ids), case.key.choice)
    assert reached[token_id] > u - 1e-9
    assert reached[token_id] - want[token_id] <= u + 1e-9
    assert want[token_id] > 0


@settings(max_examples=100, deadline=None)
@given(cases())
def test_greedy_takes_the_best_of_what_is_changed(case: Case) -> None:
    """Filters have no say in it."""
    key = replace(case.key, params=replace(case.key.params, temperature=0.0))
    greedy = replace(case, key=key)
    mask = None if case.mask is None else set(case.mask)
    logits = np.array(changed_logits(case.logits, greedy.key, case.ids, case.num_prompt, mask))
    output = only(torch.tensor(case.logits, dtype=torch.float32), spec_of(greedy))
    if logits.max() == -np.inf:
        assert isinstance(output.error, RowFailed)
    else:
        assert output.token_id is not None
        assert logits[output.token_id] >= logits.max() - 1e-12


ASKED: dict[str, SamplingParams] = {
    "temperature": SamplingParams(temperature=1.4),
    "top_k": SamplingParams(top_k=7),
    "top_p": SamplingParams(top_p=0.83),
    "min_p": SamplingParams(min_p=0.11),
    "typical_p": SamplingParams(typical_p=0.61),
    "penalties": SamplingParams(repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.3),
    "bias": SamplingParams(logit_bias=((3, 1.5), (9, -2.0))),
    "allowed": SamplingParams(allowed_token_ids=(2, 3, 5, 7, 11)),
    "banned": SamplingParams(banned_token_ids=(0, 15)),
    "all": SamplingParams(
        temperature=0.8,
        min_p=0.02,
        top_k=12,
        top_p=0.95,
        typical_p=0.9,
        frequency_penalty=0.2,
        banned_token_ids=(1,),
    ),
}


@pytest.mark.parametrize("params", ASKED.values(), ids=ASKED)
def test_draws_follow_the_distribution(params: SamplingParams) -> None:
    """Chi-square of 2,000 draws at one seed, one for each choice; 99.9 % of fair samplers stay below the limit."""
    logits = tuple(np.round(np.sin(np.arange(16) * 2.3) * 2, 3).tolist())
    ids, num_prompt, draws = (1, 2, 3, 3, 4, 4, 4), 3, 2000
    keys = [
        SampleKey(params=params, seed=7, choice=choice, eos_token_ids=(), max_tokens=9)
        for choice in range(draws)
    ]
    want = probabilities(changed_logits(logits, keys[0], ids, num_prompt), keys[0])
    assert want is not None
    rows = torch.tensor([logits], dtype=torch.float32).expand(draws, -1)
    outputs = sample(rows, [SampleSpec(key, ids, num_prompt) for key in keys])
    counts = Counter(output.token_id for output in outputs)
    assert all(want[token] > 0 for token in counts if token is not None)
    expected = {token: draws * want[token] for token in range(16) if want[token] > 0}
    chi_square = sum((counts[token] - each) ** 2 / each for token, each in expected.items())
    assert chi_square < LIMITS[len(expected) - 1]


# Chi-square quantiles at 0.999, by degrees of freedom.
LIMITS = [
    0.0,
    10.83,
    13.82,
    16.27,
    18.47,
    20.52,
    22.46,
    24.32,
    26.12,
    27.88,
    29.59,
    31.26,
    32.91,
    34.53,
    36.12,
    37.70,
]


def test_a_row_is_a_function_of_its_own_logits_and_spec_only() -> None:
    """Alone, in any order, in any company: the same token and the same logprobs, bit for bit."""
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(len(ASKED) * 2 + 9, 3001, generator=generator) * 2
    many = [*ASKED.values(), *ASKED.values(), *[SamplingParams(temperature=0.9)] * 9]
    specs = [
        SampleSpec(
            SampleKey(
                params=replace(params, logprobs=5), seed=seed, choice=0, eos_token_ids=(), max_tokens=99
            ),
            tuple(range(20 + seed)),
            10,
        )
        for seed, params in enumerate(many)
    ]
    together = sample(logits, specs)
    alone = [sample(logits[row : row + 1], specs[row : row + 1])[0] for row in range(len(specs))]
    backwards = sample(logits.flip(0), specs[::-1])[::-1]
    assert together == alone == backwards
