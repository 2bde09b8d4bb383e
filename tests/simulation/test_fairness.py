"""Nobody waits for others without end, and equal workers get equal shares."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from pdserve.service.config import Config
from tests.simulation.crowd import Crowd, Visit, serve

PROMPTS = (8, 40, 200, 600)
ANSWERS = (1, 8, 40, 120)
NUM_VISITS = 400
VISITS_A_SECOND = 40.0  # about four fifths of what the cluster can do
LONGEST_WAIT = 8.0  # × the mean service time
UNLIKE = 1.5  # the longest waits at two routers differ by no more

NUM_EACH = 60
MOST_LOADED = 1.2  # × the least loaded


def _mixed_visits(seed: int, a_second: float) -> list[Visit]:
    source = random.Random(f"visits/{seed}")
    at_s, visits = 0.0, []
    for _ in range(NUM_VISITS):
        at_s += source.expovariate(a_second)
        visits.append(Visit(at_s=at_s, num_prompt=source.choice(PROMPTS), max_tokens=source.choice(ANSWERS)))
    return visits


def _four_routers(seed: int) -> Crowd:
    """160 blocks are a handful of the larger requests: who comes must often wait."""
    return Crowd(seed=seed, routers=4, prefills=2, decodes=2, num_blocks=160, config=Config())


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_with_four_routers_nobody_waits_longer_than_eight_times_the_mean_service(seed: int) -> None:
    served = serve(_four_routers(seed), _mixed_visits(seed, VISITS_A_SECOND))
    service_s = sum(each.took_s - each.waited_s for each in served) / len(served)
    longest_s = max(each.waited_s for each in served)
    print(f"service {service_s:.3f} s, longest wait {longest_s:.3f} s = {longest_s / service_s:.1f} ×")
    assert longest_s <= LONGEST_WAIT * service_s


def test_in_a_crowd_that_comes_at_once_no_router_s_clients_wait_longer_than_the_others() -> None:
    served = serve(_four_routers(4), _mixed_visits(4, 1000.0))
    longest_s = {
        router: max(each.waited_s for each in served if each.router == router)
        for router in ("r0", "r1", "r2", "r3")
    }
    print(longest_s)
    assert max(longest_s.values()) <= UNLIKE * min(longest_s.values())


@pytest.mark.parametrize("num_workers", [2, 4])
@pytest.mark.parametrize(
    ("num_routers", "gap_s"),
    [(1, 0.02), (1, 0.5), (1, 0.0), (4, 0.02)],
    ids=["one router", "one at a time", "all at once", "four routers"],
)
def test_equal_requests_are_spread_over_equal_workers(
    num_workers: int, num_routers: int, gap_s: float
) -> None:
    crowd = Crowd(seed=7, routers=num_routers, prefills=num_workers, decodes=num_workers, config=Config())
    visits = [
        Visit(at_s=index * gap_s, num_prompt=100, max_tokens=8) for index in range(NUM_EACH * num_workers)
    ]
    served = serve(crowd, visits)
    for counts in (Counter(each.prefill for each in served), Counter(each.decode for each in served)):
        assert len(counts) == num_workers
        assert max(counts.values()) <= MOST_LOADED * min(counts.values()), counts
