"""Plans: lengths, times and prefixes as asked, the same ones for the same seed."""

from __future__ import annotations

import itertools
import statistics

import pytest

from pdserve.bench.plan import PlanOptions, make_plan
from pdserve.bench.trace import TraceRow
from pdserve.errors import InvalidRequest
from pdserve.request import Limits
from pdserve.status import ModelInfo

MODEL = ModelInfo(
    model="m",
    window_tokens=1000,
    vocab_size=50,
    eos_token_ids=(0, 7),
    has_chat_template=False,
    weights_fingerprint="",
    tokenizer_fingerprint="",
)


def prompts(options: PlanOptions) -> list[tuple[int, ...]]:
    found = [each.request.input for each in make_plan(options, MODEL).requests]
    assert all(isinstance(each, tuple) for each in found)
    return found  # type: ignore[return-value]


def test_requests_have_the_lengths_asked_for_and_are_valid() -> None:
    plan = make_plan(PlanOptions(prompt_tokens=30, output_tokens=9, num_requests=5), MODEL)
    assert len(plan.requests) == 5
    for each in plan.requests:
        each.request.check(Limits(vocab_size=50, window_tokens=1000))
        assert len(each.request.input) == 30  # type: ignore[arg-type]
        assert not {0, 7} & set(each.request.input)  # type: ignore[arg-type]
        assert (each.request.sampling.min_tokens, each.request.sampling.max_tokens) == (9, 9)
        assert each.request.sampling.ignore_eos


def test_equal_seeds_give_equal_plans_and_others_others() -> None:
    options = PlanOptions(rate=3.0, prompt_tokens=30)
    assert make_plan(options, MODEL) == make_plan(options, MODEL)
    other = PlanOptions(rate=3.0, prompt_tokens=30, seed=1)
    assert prompts(options)[0] != prompts(other)[0]
    assert len(set(prompts(options))) == 100


def test_arrivals_are_poisson() -> None:
    plan = make_plan(PlanOptions(rate=4.0, prompt_tokens=1, num_requests=4000), MODEL)
    times = [each.at_s for each in plan.requests]
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert times[0] == 0 and min(gaps) > 0
    assert statistics.mean(gaps) == pytest.approx(0.25, rel=0.1)
    assert statistics.stdev(gaps) == pytest.approx(0.25, rel=0.1)


def test_a_trace_is_scaled_in_time_and_length_and_keeps_its_prefixes() -> None:
    rows = (
        TraceRow(0.0, 1100, 64, (1, 2, 3)),
        TraceRow(8.0, 1400, 64, (1, 2, 4)),
        TraceRow(9.0, 600, 64, (5, 6)),
    )
    options = PlanOptions(rows=rows, length_scale=0.25, rate_scale=2.0)
    assert [each.at_s for each in make_plan(options, MODEL).requests] == [0.0, 4.0, 4.5]
    first, second, third = prompts(options)
    assert [len(first), len(second), len(third)] == [275, 350, 150]
    assert first[:256] == second[:256] and first[256:275] != second[256:275]
    assert third[:10] != first[:10]


def test_a_prompt_longer_than_its_blocks_goes_on_with_tokens_of_its_own() -> None:
    rows = (TraceRow(0.0, 600, 1, (1,)), TraceRow(0.0, 600, 1, (1,)))
    first, second = prompts(PlanOptions(rows=rows))
    assert len(first) == len(second) == 600
    assert first[:512] == second[:512] and first[512:] != second[512:]


def test_a_rate_beside_a_trace_takes_its_lengths_only() -> None:
    rows = (TraceRow(0.0, 10, 1), TraceRow(500.0, 20, 1))
    plan = make_plan(PlanOptions(rows=rows, rate=100.0), MODEL)
    assert plan.requests[1].at_s < 5
    assert len(plan.requests[1].request.input) == 20  # type: ignore[arg-type]


def test_what_doesnt_fit_the_window_is_left_out_and_counted() -> None:
    rows = (TraceRow(0.0, 990, 11), TraceRow(1.0, 990, 10))
    plan = make_plan(PlanOptions(rows=rows), MODEL)
    assert (len(plan.requests), plan.num_left_out) == (1, 1)
    with pytest.raises(InvalidRequest, match=r"none of the requests fits .*limit=1000"):
        make_plan(PlanOptions(rows=rows[:1]), MODEL)
    with pytest.raises(InvalidRequest, match="none of the requests fits"):
        make_plan(PlanOptions(prompt_tokens=2000), MODEL)


def test_prompts_share_a_prefix_if_asked() -> None:
    first, second, *_ = prompts(PlanOptions(prompt_tokens=40, shared_prefix=30))
    assert first[:30] == second[:30] and first[30:] != second[30:]
