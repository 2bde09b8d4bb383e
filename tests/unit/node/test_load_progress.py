"""What is said while weights load: lines every few seconds, the reason in /readyz, or a bar."""

from __future__ import annotations

from typing import Any

import structlog
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from deploy.local.probe import is_ready, why_not_ready
from pdserve.node.load import LoadProgress, LoadState
from pdserve.service.http import HttpServer
from tests.support.virtual_clock import VirtualClock


class Bar:
    """Takes down what a bar would show."""

    def __init__(self) -> None:
        self.shown: list[tuple[object, ...]] = []

    def begin(self, phase: str, total_bytes: int | None) -> None:
        self.shown.append((phase, total_bytes))

    def reached(self, num_bytes: int) -> None:
        self.shown.append((num_bytes,))


def load(bar: Bar | None, seconds_a_step: float) -> tuple[list[LoadState], list[Any]]:
    """1,000 MB in ten steps."""
    clock, states = VirtualClock(), list[LoadState]()
    with capture_logs() as lines:
        progress = LoadProgress(clock, states.append, bar)
        progress.begin("weights", 1_000_000_000)
        for step in range(10):
            clock.advance(seconds_a_step)
            progress.reached(step * 100_000_000)
        structlog.get_logger().info("model.loaded", **progress.facts())
    return states, [{key: value for key, value in line.items() if key != "log_level"} for line in lines]


def test_a_long_load_is_told_every_few_seconds() -> None:
    states, lines = load(None, 2.0)
    assert lines == [
        {"event": "model.loading", "total_bytes": 1_000_000_000},
        {"event": "model.loading", "loaded_bytes": 200_000_000, "total_bytes": 1_000_000_000, "took_s": 6.0},
        {"event": "model.loading", "loaded_bytes": 500_000_000, "total_bytes": 1_000_000_000, "took_s": 12.0},
        {"event": "model.loading", "loaded_bytes": 800_000_000, "total_bytes": 1_000_000_000, "took_s": 18.0},
        {"event": "model.loaded", "total_bytes": 1_000_000_000, "took_s": 20.0},
    ]
    assert len(states) == 11
    assert str(states[6]) == "500 of 1,000 MB of weights, 12 s"


def test_a_short_load_is_two_lines() -> None:
    _, lines = load(None, 0.01)
    assert [line["event"] for line in lines] == ["model.loading", "model.loaded"]


def test_a_bar_is_not_broken_by_lines() -> None:
    bar = Bar()
    states, lines = load(bar, 2.0)
    assert [line["event"] for line in lines] == ["model.loaded"]
    assert bar.shown[:3] == [("weights", 1_000_000_000), (0,), (0,)]
    assert bar.shown[-1] == (900_000_000,)
    assert len(states) == 11


async def test_the_supervisor_hears_what_a_child_lacks() -> None:
    lacks = ["the model is loading: 1 of 2 MB of weights, 3 s", "no router has taken it in"]
    http = HttpServer(CollectorRegistry(), lambda: (), lambda: lacks)
    address = await http.start("127.0.0.1:0")
    try:
        assert await why_not_ready(address) == ", ".join(lacks)
        assert not await is_ready(address)
        lacks.clear()
        assert await why_not_ready(address) is None
        assert await is_ready(address)
    finally:
        http.close()
    assert await why_not_ready(address) == ""
