"""The whole cluster under hundreds of seeds: every invariant, and every row of failures in every phase."""

from __future__ import annotations

import pytest

from pdserve.clock import SystemClock
from tests.simulation.batch import run_many
from tests.simulation.coverage import POSSIBLE, ROWS, WHY_NOT, Coverage
from tests.simulation.kinds import PHASES
from tests.simulation.scenario import draw_scenario
from tests.simulation.seeds import FIRST_SEED, NUM_SEEDS, NUM_SEEDS_SLOW, RARE_SEEDS, REGRESSION_SEEDS

NUM_PROCESSES = 2


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("num_seeds", "least"),  # a cell of the coverage table is met so often
    [
        pytest.param(NUM_SEEDS, 1, id="some"),
        pytest.param(NUM_SEEDS_SLOW, 5, id="all", marks=pytest.mark.slow),
    ],
)
def test_no_seed_breaks_an_invariant_and_every_cell_is_covered(num_seeds: int, least: int) -> None:
    clock = SystemClock()
    begun_s = clock.now_s()
    coverage, broken, num_run = Coverage(), [], 0
    seeds = [*REGRESSION_SEEDS, *RARE_SEEDS, *range(FIRST_SEED, FIRST_SEED + num_seeds)]
    for outcome in run_many(seeds, NUM_PROCESSES):
        num_run += 1
        assert outcome.num_requests >= 30 and outcome.num_faults >= 3
        coverage.merge(outcome.coverage)
        if outcome.violations:
            broken.append(f"python -m tests.simulation --seed {outcome.seed}: {outcome.violations[0]}")
    took_s = clock.now_s() - begun_s
    print(f"{num_run} seeds in {took_s:.1f} s, {num_run / took_s:.2f} seeds/s")
    print(coverage)
    assert not broken, "\n".join(broken)
    assert not coverage.missing(least), "\n".join(coverage.missing(least))


def test_each_row_says_why_it_cant_occur_in_the_other_phases() -> None:
    assert [row for row in ROWS if POSSIBLE[row] != PHASES] == sorted(WHY_NOT)


@pytest.mark.parametrize("seed", range(20))
def test_a_scenario_is_as_large_as_asked(seed: int) -> None:
    scenario = draw_scenario(seed)
    roles = [worker.role.value for worker in scenario.workers]
    assert len(scenario.plans) >= 30 and len(scenario.faults) >= 3
    assert roles.count("prefill") >= 2 and roles.count("decode") >= 2
    assert 1 <= len(scenario.router_ids) <= 4
