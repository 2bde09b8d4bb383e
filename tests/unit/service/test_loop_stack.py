"""A held-up loop is told by the names of the calls that hold it, once each time and not too often."""

from __future__ import annotations

import asyncio
import selectors
import socket
import sys
import threading
from collections.abc import Callable

from structlog.testing import capture_logs
from structlog.typing import EventDict

from pdserve.service.loop_stack import LATE_S, LoopStack
from tests.support.virtual_clock import VirtualClock


def elsewhere(call: Callable[[], object]) -> None:
    """On another thread, while this one waits in here."""
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


def a_slow_callback(stack: LoopStack, clock: VirtualClock, held_s: float, num_looks: int = 2) -> None:
    clock.advance(held_s)
    for _ in range(num_looks):
        elsewhere(stack.look)


def held_by(held_s: list[float], between_s: float) -> list[EventDict]:
    """The log of a loop that is held up so long, again and again."""
    clock = VirtualClock()
    stack = LoopStack(clock)

    async def loop() -> None:
        stack._loop_thread = threading.get_ident()
        for each_s in held_s:
            stack.beat()
            a_slow_callback(stack, clock, each_s)
            clock.advance(between_s)

    with capture_logs() as logs:
        asyncio.run(loop())
    return logs


def test_the_callback_is_named() -> None:
    [told] = held_by([2 * LATE_S], 0.0)
    assert (told["event"], told["late_s"]) == ("loop.held", 0.2)
    assert any(frame.startswith("a_slow_callback (test_loop_stack.py:") for frame in told["frames"])
    assert not any("run_forever" in frame for frame in told["frames"])


def test_a_loop_in_time_is_not_told_of() -> None:
    assert held_by([0.5 * LATE_S] * 20, 0.0) == []


def test_many_are_told_in_one_line_each_ten_seconds() -> None:
    told = held_by([0.2] * 30, 1.0)
    assert [line["num_untold"] for line in told] == [0, 8, 8, 8]


def test_an_idle_loop_is_late_by_the_machine_and_not_told_of() -> None:
    clock = VirtualClock()
    stack = LoopStack(clock)
    near, far = socket.socketpair()
    selector = selectors.DefaultSelector()
    selector.register(near, selectors.EVENT_READ)
    idle = threading.Thread(target=selector.select)
    with near, far, selector, capture_logs() as logs:
        idle.start()
        assert idle.ident is not None
        while sys._current_frames()[idle.ident].f_code.co_filename != selectors.__file__:
            pass
        stack._loop_thread = idle.ident
        clock.advance(1.0)
        stack.look()
        far.send(b"x")
        idle.join()
    assert logs == []


async def test_it_starts_looks_and_stops() -> None:
    clock = VirtualClock()
    stack = LoopStack(clock)
    stack.start()
    stack.stop()
    stack.stop()
