"""Reports of runs: rates, percentiles, objectives, comparison and picture."""

from __future__ import annotations

import json
import random
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.bench.compare import compare
from pdserve.bench.drive import RequestRecord, Run
from pdserve.bench.plot import plot
from pdserve.bench.report import Distribution, Objectives, lines_of, make_report
from tests.unit.bench.measured import outcome

EVERYTHING = Objectives()


def test_rates_are_of_the_whole_run() -> None:
    run = Run(
        [outcome(1.0, 2.0), outcome(0.5), outcome(code="RESOURCE_EXHAUSTED"), outcome(code="UNAVAILABLE")],
        4.0,
    )
    report = make_report(run, EVERYTHING)
    assert report.rates == {"requests": 0.5, "prompt_tokens": 5.0, "output_tokens": 0.75}
    assert (report.num_sent, report.num_ok, report.num_refused) == (4, 2, 1)
    assert report.codes == {"RESOURCE_EXHAUSTED": 1, "UNAVAILABLE": 1}


def test_refused_and_failed_requests_miss_objectives_that_nothing_is_asked_by() -> None:
    report = make_report(Run([outcome(1.0), outcome(code="RESOURCE_EXHAUSTED")], 2.0), EVERYTHING)
    assert (report.goodput, report.share_good) == (0.5, 0.5)


@pytest.mark.parametrize(
    ("objectives", "share"),
    [
        (Objectives(ttft_s=1.0), 1.0),
        (Objectives(ttft_s=0.9), 0.5),
        (Objectives(gap_s=3.0), 1.0),
        (Objectives(gap_s=2.9), 0.5),
        (Objectives(tpot_s=2.0), 1.0),
        (Objectives(tpot_s=1.9), 0.5),
        (Objectives(ttft_s=0.9, gap_s=2.9), 0.5),
    ],
)
def test_every_objective_must_be_met(objectives: Objectives, share: float) -> None:
    late = outcome(1.0, 2.0, 5.0)  # TTFT 1, gaps 1 and 3, TPOT 2
    assert make_report(Run([late, outcome(0.5)], 5.0), objectives).share_good == share


def test_gaps_are_between_events_and_time_a_token_is_by_tokens() -> None:
    each = outcome(1.0, 3.0, num_tokens=5)
    assert (each.gaps_s, each.tpot_s) == ([2.0], 0.5)


def test_an_empty_run_has_a_report() -> None:
    report = make_report(Run([], 0.0, was_stopped=True), EVERYTHING)
    assert report.goodput == 0 and "(stopped)" in lines_of(report)[0]


def test_sending_late_is_said() -> None:
    late = outcome(3.0)
    late.planned_s = -1.0
    assert any(
        "sent late: this machine" in line for line in lines_of(make_report(Run([late], 3.0), EVERYTHING))
    )
    on_time = make_report(Run([outcome(3.0)], 3.0), EVERYTHING)
    assert not any("this machine" in line for line in lines_of(on_time))


def test_a_report_is_json() -> None:
    found = json.loads(json.dumps(make_report(Run([outcome(1.0, 2.0)], 2.0), EVERYTHING).to_json()))
    assert found["measured"]["ttft"]["p50"] == 1000.0 and found["measured"]["gap"]["n"] == 1
    assert found["parts"]["prefill"]["mean"] == 8.0 and found["rates"]["output_tokens"] == 1.0


@given(st.lists(st.floats(0, 1e6), max_size=50))
def test_percentiles_ascend(values: list[float]) -> None:
    found = Distribution.of(values)
    ascending = [*found.percentiles.values(), found.max]
    assert found.n == len(values) and ascending == sorted(ascending)


def shares(
    first: float, second: float, num: int = 200
) -> tuple[list[list[RequestRecord]], list[list[RequestRecord]]]:
    drawn = random.Random(5)
    return tuple(  # type: ignore[return-value]
        [[outcome(0.5 if drawn.random() < share else 5.0) for _ in range(num)] for _ in range(3)]
        for share in (first, second)
    )


def test_a_clear_difference_is_said_with_its_interval() -> None:
    firsts, seconds = shares(0.5, 0.9)
    found = compare(firsts, seconds, Objectives(ttft_s=1.0), seed=0)
    assert 0 < found.low < found.difference < found.high < 0.6
    assert found.verdict("A", "B").startswith("B serves this load better than A.")
    assert compare(seconds, firsts, Objectives(ttft_s=1.0), seed=0).verdict("B", "A").startswith("B serves")


def test_no_difference_is_no_verdict() -> None:
    firsts, seconds = shares(0.7, 0.7)
    assert (
        compare(firsts, seconds, Objectives(ttft_s=1.0), seed=0).verdict("A", "B").startswith("No difference")
    )


def test_the_interval_holds_the_truth_as_often_as_it_says() -> None:
    held = 0
    for seed in range(100):
        drawn = random.Random(seed)
        firsts, seconds = (
            [[outcome(0.5 if drawn.random() < share else 5.0) for _ in range(100)]] for share in (0.6, 0.8)
        )
        found = compare(firsts, seconds, Objectives(ttft_s=1.0), seed=seed)
        held += found.low <= 0.2 <= found.high
    assert 85 <= held <= 100


def test_rounds_that_differ_by_themselves_are_no_verdict() -> None:
    wrong = 0
    for seed in range(200):
        drawn = random.Random(seed)
        firsts, seconds = (
            [
                [outcome(0.5 if drawn.random() < share else 5.0) for _ in range(100)]
                for share in (drawn.choice((0.5, 0.7, 0.9)) for _ in range(3))
            ]
            for _ in range(2)
        )
        found = compare(firsts, seconds, Objectives(ttft_s=1.0), seed=seed)
        wrong += not found.low <= 0 <= found.high
    assert wrong <= 20  # of 200, at a confidence of 95 %


def test_one_round_says_that_it_is_one() -> None:
    firsts, seconds = shares(0.5, 0.9)
    found = compare(firsts[:1], seconds[:1], Objectives(ttft_s=1.0), seed=0)
    assert "of one round" in found.verdict("A", "B")


def test_neighbours_that_share_a_fate_widen_the_interval() -> None:
    alternating = [[outcome(0.5 if number % 2 else 5.0) for number in range(100)]]
    bursts = [[outcome(0.5 if number % 20 < 10 else 5.0) for number in range(100)]]
    never = [[outcome(5.0)] * 100]
    wanted = Objectives(ttft_s=1.0)
    narrow, wide = (compare(never, each, wanted, seed=0) for each in (alternating, bursts))
    assert narrow.difference == wide.difference == 0.5
    assert wide.high - wide.low > 2 * (narrow.high - narrow.low)


@pytest.mark.parametrize(
    "outcomes",
    [
        [],
        [outcome(code="UNAVAILABLE")],
        [outcome(0.0)],
        [outcome(0.1, 0.2, 0.2), outcome(1.0), outcome(code="STOPPED")],
        [outcome(*(0.001 * n for n in range(1, 5000)))],
    ],
)
def test_a_picture_is_well_formed_and_bounded(outcomes: list[RequestRecord]) -> None:
    drawn = plot(Run(outcomes, 2.0), "a < b & c")
    root = ET.fromstring(drawn)
    assert root.tag.endswith("svg") and "nan" not in drawn and "inf" not in drawn.replace("info", "")
    assert len(drawn) < 200_000
    for text in root.iter("{http://www.w3.org/2000/svg}text"):
        assert 0 <= float(text.attrib["x"]) <= 1000 and 0 <= float(text.attrib["y"]) <= 420
