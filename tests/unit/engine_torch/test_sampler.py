"""The sampler: exact draws, each filter and change by hand, logprobs, and rows that fail alone.

All of them together, against the documented definition: tests/property/sampling.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from pdserve.engine.philox import uniform
from pdserve.engine.port import RowOutput, SampleSpec
from pdserve.engine.sampler import sample
from pdserve.engine.token_filters import draw, min_p_places, top_k_places, top_p_places, typical_p_places
from pdserve.engine.token_scores import best_ids
from pdserve.errors import RowFailed
from pdserve.sampling import SampleKey, SamplingParams
from pdserve.token_mask import allows, to_flags, to_mask


def spec(
    params: SamplingParams,
    *,
    seed: int = 1,
    choice: int = 0,
    num_ids: int = 10,
    num_prompt: int = 10,
    eos: int = 0,
) -> SampleSpec:
    key = SampleKey(params=params, seed=seed, choice=choice, eos_token_ids=(eos,), max_tokens=100)
    return SampleSpec(key, tuple(range(num_ids)), num_prompt)


def tokens(outputs: list[RowOutput]) -> list[int | None]:
    return [output.token_id for output in outputs]


def test_greedy_takes_the_lowest_of_equal_ids() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [5.0, 5.0, 5.0, 5.0]])
    assert tokens(sample(logits, [spec(SamplingParams(temperature=0))] * 2)) == [1, 0]


def test_draw_takes_the_first_id_whose_cumulative_exceeds_u() -> None:
    probabilities = torch.tensor([0.25, 0.0, 0.25, 0.5, 0.0], dtype=torch.float64)
    cases = {0.0: 0, 0.2499: 0, 0.25: 2, 0.4999: 2, 0.5: 3, 0.999999: 3}
    assert {u: draw(probabilities, u) for u in cases} == cases


def test_draw_falls_back_to_the_last_id_that_has_a_probability() -> None:
    probabilities = torch.tensor([0.5, 0.4999, 0.0, 0.0], dtype=torch.float64)
    assert draw(probabilities, 0.99999) == 1


def test_an_id_of_probability_zero_is_never_drawn() -> None:
    assert draw(torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64), 0.0) == 2


def test_a_row_is_a_function_of_its_own_logits_and_spec_only() -> None:
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(6, 300, generator=generator) * 2
    params = SamplingParams(temperature=0.9, top_k=50, top_p=0.9)
    specs = [spec(params, seed=seed, num_ids=20 + seed) for seed in range(6)]
    together = tokens(sample(logits, specs))
    alone = [tokens(sample(logits[row : row + 1], specs[row : row + 1]))[0] for row in range(6)]
    backwards = tokens(sample(logits.flip(0), specs[::-1]))[::-1]
    assert together == alone == backwards


def test_vectors() -> None:
    """Fixed logits, seeds and positions give these tokens for ever; the probabilities are far from ties."""
    logits = (torch.arange(97, dtype=torch.float32) * 37 % 89 / 16).repeat(4, 1)
    specs = [
        spec(SamplingParams(temperature=1.0), seed=42, num_ids=17),
        spec(SamplingParams(temperature=0.7, top_k=40), seed=42, num_ids=17),
        spec(SamplingParams(temperature=1.3, top_p=0.8), seed=1 << 63, choice=3, num_ids=1000),
        spec(SamplingParams(temperature=0.0), seed=9),
    ]
    assert tokens(sample(logits, specs)) == VECTOR_TOKENS


VECTOR_TOKENS = [11, 12, 2, 12]


def test_min_tokens_rules_out_every_end() -> None:
    logits = torch.tensor([[9.0, 8.0, 7.0, 1.0]])
    params = SamplingParams(temperature=0, min_tokens=3, stop_token_ids=(1,))
    early = spec(params, num_ids=12, num_prompt=10)
    late = spec(params, num_ids=13, num_prompt=10)
    assert tokens(sample(logits, [early])) == [2]
    assert tokens(sample(logits, [late])) == [0]
    seeded = SamplingParams(temperature=1, min_tokens=3, stop_token_ids=(1, 2))
    assert tokens(sample(logits, [spec(seeded, num_ids=12, num_prompt=10)])) == [3]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_a_possible_token_fails(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, min_tokens=5, stop_token_ids=(1,))
    (output,) = sample(torch.zeros(1, 2), [spec(params)])
    assert isinstance(output.error, RowFailed)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_logits_that_are_not_finite_end_only_their_row(poison: float) -> None:
    logits = torch.zeros(3, 8)
    logits[:, 4] = 1
    logits[1, 6] = poison
    outputs = sample(logits, [spec(SamplingParams(temperature=0))] * 3)
    assert tokens(outputs) == [4, None, 4]
    assert isinstance(outputs[1].error, RowFailed)
    assert outputs[1].error.fields == {"position": 10}


def test_a_tiny_temperature_is_greedy_not_an_overflow() -> None:
    logits = torch.tensor([[1.0, 1000.0, 999.0]])
    assert tokens(sample(logits, [spec(SamplingParams(temperature=1e-6))])) == [1]


def test_no_rows() -> None:
    assert sample(torch.zeros(0, 8), []) == []


def kept(places: torch.Tensor) -> list[int]:
    return list(places.tolist())


def wide(*logits: float) -> torch.Tensor:
    return torch.tensor(logits, dtype=torch.float64)


def test_top_k_keeps_equals_of_the_last() -> None:
    assert kept(top_k_places(wide(1, 3, 2, 2), 2)) == [1, 2, 3]


def test_top_p_keeps_at_least_the_best_and_of_equals_the_lower_ids() -> None:
    assert kept(top_p_places(wide(1, 3, 2), 1e-9)) == [1]
    assert kept(top_p_places(wide(0, 0, 0, 0, 0), 0.5)) == [0, 1, 2]


def test_top_p_needs_no_full_sort_to_be_exact() -> None:
    """A long flat tail is cut off before the sort; what is kept is the same."""
    logits = torch.randn(5000, generator=torch.Generator().manual_seed(3), dtype=torch.float64) * 3
    ordered = torch.sort(logits, descending=True, stable=True)
    reached = torch.softmax(ordered.values, dim=-1).cumsum(dim=-1)
    for top_p in (0.1, 0.5, 0.9, 0.99, 0.99999):
        count = int((reached < top_p).sum()) + 1
        assert kept(top_p_places(logits, top_p)) == sorted(ordered.indices[:count].tolist())


def test_min_p_is_relative_to_the_best() -> None:
    likely = torch.tensor([0.5, 0.3, 0.1, 0.1], dtype=torch.float64).log()
    assert kept(min_p_places(likely, 0.5)) == [0, 1]
    assert kept(min_p_places(likely, 1.0)) == [0]
    assert kept(min_p_places(wide(2, 1, 2), 1.0)) == [0, 2]


def test_typical_p_may_leave_the_best_out() -> None:
    """Information of 0.05 … 4.6 nats, expected 0.47: the second is nearest to it. Source: see the function."""
    likely = torch.tensor([0.9, 0.05, 0.03, 0.02], dtype=torch.float64).log()
    assert kept(typical_p_places(likely, 0.01)) == [0]
    flat = torch.tensor([0.4, 0.3, 0.1, 0.1, 0.1], dtype=torch.float64).log()
    assert kept(typical_p_places(flat, 0.25)) == [1]
    assert kept(typical_p_places(flat, 1 - 1e-12)) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("spread", [0.1, 1.0, 4.0, 12.0])
def test_typical_p_needs_no_full_sort_to_be_exact(spread: float) -> None:
    for seed in range(4):
        logits = (
            torch.randn(3000, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * spread
        )
        logprobs = torch.log_softmax(logits, dim=-1)
        entropy = -float((logprobs.exp() * logprobs).sum())
        nearest = sorted(range(3000), key=lambda token: abs(-float(logprobs[token]) - entropy))
        for typical_p in (0.05, 0.5, 0.9, 0.99):
            reached = torch.cumsum(logprobs[nearest].exp(), dim=-1)
            count = int((reached < typical_p).sum()) + 1
            assert kept(typical_p_places(logits, typical_p)) == sorted(nearest[:count])


def test_a_mask_rules_out_what_a_grammar_does() -> None:
    logits = torch.arange(70, dtype=torch.float32)
    for temperature in (0.0, 1.0):
        asked = spec(SamplingParams(temperature=temperature))
        for allowed in ([0], [31], [32], [69]):
            masked = replace(asked, mask=to_mask(allowed, 70))
            assert tokens(sample(logits.unsqueeze(0), [masked])) == allowed


def test_masks_say_what_they_were_made_of() -> None:
    mask = to_mask([0, 31, 32, 69], 70)
    assert mask.dtype == np.dtype(np.int32)
    assert mask.tolist() == [-(2**31) + 1, 1, 32]
    assert np.flatnonzero(to_flags(mask, 70)).tolist() == [0, 31, 32, 69]
    assert [token for token in range(100) if allows(mask, token)] == [0, 31, 32, 69]


def test_a_bad_word_may_begin_in_the_prompt() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 9.0]])
    asked = spec(SamplingParams(temperature=0))
    key = replace(asked.key, bad_word_ids=((7, 8, 3),))
    assert tokens(sample(logits, [SampleSpec(key, (7, 8), 2)])) == [2]
    assert tokens(sample(logits, [SampleSpec(key, (8, 7), 2)])) == [3]
    assert tokens(sample(logits, [SampleSpec(key, (8,), 1)])) == [3]


def test_an_id_that_the_vocabulary_lacks_ends_its_row_only() -> None:
    logits = torch.zeros(2, 8)
    logits[:, 5] = 1
    odd = spec(SamplingParams(temperature=0, repetition_penalty=2.0), num_ids=20)
    even = spec(SamplingParams(temperature=0))
    outputs = sample(logits, [odd, even])
    assert isinstance(outputs[0].error, RowFailed)
    assert outputs[1].token_id == 5
    biased = SamplingParams(
        temperature=0, logit_bias=((900, 5.0),), allowed_token_ids=(4, 5, 99), banned_token_ids=(77,)
    )
    assert tokens(sample(logits, [spec(biased)] * 2)) == [5, 5]


def test_logprobs_are_the_models_own() -> None:
    """Whatever the request changes: also of a token that couldn't be drawn without it."""
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0]])
    want = torch.log_softmax(logits[0].double(), dim=-1)
    asked = SamplingParams(temperature=0, logprobs=3, allowed_token_ids=(0,), logit_bias=((0, -50.0),))
    (output,) = sample(logits, [spec(asked)])
    assert output.token_id == 0
    assert output.logprobs is not None
    assert output.logprobs.logprob == pytest.approx(float(want[0]), rel=1e-6)
    assert [token for token, _ in output.logprobs.top] == [1, 2, 3]
    assert [value for _, value in output.logprobs.top] == pytest.approx(want[[1, 2, 3]].tolist(), rel=1e-6)
    (output,) = sample(logits, [spec(SamplingParams(temperature=0, logprobs=0))])
    assert output.logprobs is not None
    assert output.logprobs.logprob == pytest.approx(float(want[1]), rel=1e-6)
    assert not output.logprobs.top


def test_best_ids_are_the_first_of_equals() -> None:
    values = torch.tensor([1.0, 5.0, 5.0, 2.0, 5.0, 2.0])
    assert best_ids(values, 2).tolist() == [1, 2]
    assert best_ids(values, 4).tolist() == [1, 2, 4, 3]
    assert best_ids(values, 9).tolist() == [1, 2, 4, 3, 5, 0]


def test_samples_follow_the_distribution() -> None:
    """Chi-square over 20,000 draws at one seed: 15 degrees of freedom, 99.9 % of fair samplers stay below 37.7."""
    probabilities = torch.softmax(torch.arange(16, dtype=torch.float64) / 4, dim=-1)
    draws = 20_000
    counts = np.bincount(
        [draw(probabilities, uniform(3, position, 0)) for position in range(draws)], minlength=16
    )
    expected = probabilities.numpy() * draws
    assert float(((counts - expected) ** 2 / expected).sum()) < 37.7
