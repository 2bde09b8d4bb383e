"""Work beside the loop: users in turn, step by step, no more than the budget, and none for requests that are over."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

import pytest
from prometheus_client import CollectorRegistry

from pdserve.clock import SystemClock
from pdserve.errors import InvalidRequest, Overloaded
from pdserve.steps import Steps
from router.metrics import RouterMetrics
from router.turns import Turns

T = TypeVar("T")


class OneByOne:
    """Steps are done when the test says so."""

    def __init__(self) -> None:
        self._begun: list[asyncio.Event] = []

    async def run(self, call: Callable[[], T], /) -> T:
        go = asyncio.Event()
        self._begun.append(go)
        await go.wait()
        return call()

    async def do_one(self) -> None:
        """The step that was begun first."""
        await settle()
        self._begun.pop(0).set()
        await settle()

    @property
    def num_begun(self) -> int:
        return len(self._begun)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


class Run:
    """What was done, in order, by one thread that has to be shared."""

    def __init__(self, max_bytes: int = 1_000) -> None:
        self.work = OneByOne()
        self.registry = CollectorRegistry()
        self.turns = Turns(self.work, SystemClock(), RouterMetrics(self.registry), max_bytes, num_threads=1)
        self.done: list[str] = []

    def start(self, name: str, num_steps: int, user: str, num_bytes: int = 10) -> asyncio.Task[str]:
        return asyncio.ensure_future(
            self.turns.run(self._steps(name, num_steps), user=user, num_bytes=num_bytes)
        )

    def _steps(self, name: str, num_steps: int) -> Steps[str]:
        for step in range(num_steps):
            self.done.append(f"{name}{step}")
            if step < num_steps - 1:
                yield
        return name

    def figure(self, name: str) -> float | None:
        return self.registry.get_sample_value(f"pdserve_reading_{name}")


async def test_a_user_with_much_to_do_holds_up_another_by_two_steps_at_most() -> None:
    run = Run()
    long = [run.start(name, 5, "one") for name in "abc"]
    await run.work.do_one()
    short = run.start("x", 1, "two")
    for _ in range(3):  # the one that had its turn, the next one of the same user, then it
        await run.work.do_one()
    assert run.done == ["a0", "b0", "c0", "x0"] and short.result() == "x"
    while run.work.num_begun:
        await run.work.do_one()
    assert [each.result() for each in long] == ["a", "b", "c"]
    assert run.figure("bytes") == 0


async def test_what_is_cancelled_stops_after_the_step_that_runs() -> None:
    run = Run()
    runs, waits = run.start("a", 100, "one"), run.start("b", 100, "two")
    await run.work.do_one()
    runs.cancel()
    await settle()
    waits.cancel()
    await settle()
    other = run.start("c", 1, "three")
    while run.work.num_begun and not other.done():
        await run.work.do_one()
    assert other.result() == "c"
    assert len(run.done) <= 3
    assert run.figure("bytes") == 0


async def test_over_the_budget_a_user_may_have_an_even_share() -> None:
    run = Run(max_bytes=1_000)
    first = run.start("a", 1, "one", 900)
    await settle()
    with pytest.raises(Overloaded, match=r"too much is being read .*limit_bytes=1000, value=1100") as refused:
        await run.start("b", 1, "one", 200)
    assert refused.value.retry_after_s >= 0
    with pytest.raises(Overloaded):
        await run.start("c", 1, "two", 501)
    small = run.start("d", 1, "two", 500)
    while run.work.num_begun:
        await run.work.do_one()
    assert (first.result(), small.result()) == ("a", "d")
    assert run.figure("refused_total") == 2 and run.figure("bytes") == 0


async def test_one_message_of_any_size_is_read_when_nothing_else_is() -> None:
    run = Run(max_bytes=10)
    alone = run.start("a", 1, "one", 10)
    await run.work.do_one()
    assert alone.result() == "a"


async def test_errors_of_steps_are_raised_and_leave_nothing() -> None:
    run = Run()

    def steps() -> Steps[None]:
        yield
        raise InvalidRequest("no")

    failing = asyncio.ensure_future(run.turns.run(steps(), user="", num_bytes=5))
    await run.work.do_one()
    await run.work.do_one()
    with pytest.raises(InvalidRequest):
        await failing
    assert run.figure("bytes") == 0
