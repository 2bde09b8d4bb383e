"""The sampler: exact draws, filters against a plain NumPy oracle, and rows that fail alone."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.engine.philox import uniform
from pdserve.engine.port import RowOutput, SampleSpec
from pdserve.engine.sampler import distribution, draw, keep_top_k, keep_top_p, sample
from pdserve.errors import RowFailed
from pdserve.sampling import SampleKey, SamplingParams

Floats = npt.NDArray[np.float64]


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


def oracle(logits: Floats, temperature: float, top_k: int, top_p: float) -> Floats:
    """The filtered distribution, written another way: by ranking ids."""
    weights = np.exp((logits - logits.max()) / temperature)
    if 0 < top_k < len(logits):
        weights = np.where(logits >= np.sort(logits)[-top_k], weights, 0)
    ranked = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    total = weights.sum()
    reached = 0.0
    kept = np.zeros(len(logits), dtype=bool)
    for token in ranked:
        if reached >= top_p:
            break
        kept[token] = True
        reached += weights[token] / total
    weights = np.where(kept, weights, 0)
    return np.asarray(weights / weights.sum())


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(-40, 40), min_size=1, max_size=40),
    st.sampled_from([0.1, 0.7, 1.0, 1.9]),
    st.integers(0, 45),
    st.sampled_from([0.05, 0.33, 0.5, 0.9, 0.999, 1.0]),
)
def test_filters_equal_the_oracle(values: list[int], temperature: float, top_k: int, top_p: float) -> None:
    logits = torch.tensor(values, dtype=torch.float64) / 8
    got = distribution(logits, temperature, top_k, top_p)
    assert got is not None
    np.testing.assert_allclose(got.numpy(), oracle(logits.numpy(), temperature, top_k, top_p), atol=1e-12)


def test_top_k_keeps_equals_of_the_last() -> None:
    kept = keep_top_k(torch.tensor([1.0, 3.0, 2.0, 2.0], dtype=torch.float64), 2)
    assert torch.isfinite(kept).tolist() == [False, True, True, True]


def test_top_p_keeps_at_least_the_best() -> None:
    kept = keep_top_p(torch.tensor([1.0, 3.0, 2.0], dtype=torch.float64), 1e-9)
    assert torch.isfinite(kept).tolist() == [False, True, False]


def test_samples_follow_the_distribution() -> None:
    """Chi-square over 20,000 draws at one seed: 15 degrees of freedom, 99.9 % of fair samplers stay below 37.7."""
    probabilities = torch.softmax(torch.arange(16, dtype=torch.float64) / 4, dim=-1)
    draws = 20_000
    counts = np.bincount(
        [draw(probabilities, uniform(3, position, 0)) for position in range(draws)], minlength=16
    )
    expected = probabilities.numpy() * draws
    assert float(((counts - expected) ** 2 / expected).sum()) < 37.7
