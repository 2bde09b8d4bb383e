"""The virtual-time loop that the router's tests and the simulation stand on."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.virtual_clock import VirtualClock
from tests.support.virtual_loop import Hang, LeftBehind, run_virtual


def test_sleeping_costs_no_time_and_moves_the_clock() -> None:
    clock = VirtualClock()
    start_s = clock.now_s()
    run_virtual(asyncio.sleep(3600), clock)
    assert clock.now_s() - start_s == pytest.approx(3600)


def test_waiting_for_nothing_is_a_hang_that_names_the_task() -> None:
    async def wait_for_ever() -> None:
        await asyncio.Event().wait()

    with pytest.raises(Hang, match="wait_for_ever"):
        run_virtual(wait_for_ever())


def test_the_limit_ends_an_endless_ticker() -> None:
    async def tick() -> None:
        while True:
            await asyncio.sleep(1)

    with pytest.raises(Hang, match="limit"):
        run_virtual(tick(), limit_s=10)


def test_a_task_left_behind_is_an_error() -> None:
    async def main() -> None:
        asyncio.get_running_loop().create_task(asyncio.sleep(5))

    with pytest.raises(LeftBehind):
        run_virtual(main())


def test_a_task_that_failed_unseen_is_an_error() -> None:
    async def fail() -> None:
        raise ValueError("unseen")

    async def main() -> None:
        asyncio.get_running_loop().create_task(fail())
        await asyncio.sleep(1)

    with pytest.raises(LeftBehind, match="unseen"):
        run_virtual(main())


def test_a_group_is_cancelled_in_the_order_of_its_tasks() -> None:
    cancelled: list[int] = []

    async def wait(number: int) -> None:
        try:
            await asyncio.sleep(100)
        except asyncio.CancelledError:
            cancelled.append(number)
            raise

    async def main() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1), asyncio.TaskGroup() as group:
                for number in range(50):
                    group.create_task(wait(number))

    run_virtual(main())
    assert cancelled == list(range(50))
