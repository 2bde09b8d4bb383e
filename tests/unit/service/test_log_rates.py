"""What somebody from outside can cause doesn't fill the log."""

from __future__ import annotations

import pytest
import structlog

from pdserve.service.log_rates import FROM_OUTSIDE, MOST_LINES, WINDOW_S, LogRates
from tests.support.virtual_clock import VirtualClock


def passed(rates: LogRates, name: str, count: int) -> list[int]:
    """How many each line that passes says were left out before it."""
    found = []
    for _ in range(count):
        try:
            found.append(int(rates(None, "info", {"event": name}).get("num_left_out", 0)))
        except structlog.DropEvent:
            continue
    return found


def test_so_many_of_a_kind_pass_and_the_next_says_how_many_did_not() -> None:
    clock = VirtualClock()
    rates = LogRates(clock)
    assert passed(rates, "request.refused", 10_000) == [0] * MOST_LINES
    assert passed(rates, "session.refused", 3) == [0, 0, 0], "another kind has its own"
    clock.advance(WINDOW_S)
    assert passed(rates, "request.refused", 2) == [10_000 - MOST_LINES, 0]


@pytest.mark.parametrize("name", ["request.finished", "worker.left", "step.died"])
def test_what_only_the_cluster_can_cause_is_not_bounded(name: str) -> None:
    assert name not in FROM_OUTSIDE
    assert len(passed(LogRates(VirtualClock()), name, 1_000)) == 1_000
