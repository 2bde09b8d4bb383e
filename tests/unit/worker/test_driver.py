"""Drivers call their owner in order, tell its death once, and stop."""

from __future__ import annotations

import asyncio
import random
import threading

from pdserve.worker.driver import EventWaiter, LoopInbox, ThreadDriver
from tests.simulation.loop_driver import DelayedInbox, LoopDriver
from tests.support.virtual_clock import VirtualClock
from tests.support.virtual_loop import run_virtual


class Recorder:
    """An owner that writes down what it is given; dies of "die", asks for `wait_s` after each turn."""

    def __init__(self, wait_s: float | None = None) -> None:
        self.seen: list[object] = []
        self.num_turns = 0
        self.wait_s = wait_s
        self.done = threading.Event()

    def handle(self, message: object) -> None:
        if message == "die":
            raise RuntimeError("told to die")
        self.seen.append(message)
        if message == "last":
            self.done.set()

    def step(self) -> float | None:
        self.num_turns += 1
        return self.wait_s


def test_thread_driver_keeps_order_and_stops() -> None:
    owner = Recorder()
    driver = ThreadDriver(EventWaiter(), "engine", lambda error: None)
    driver.start(owner)
    post = driver.port("loop")
    for index in range(1000):
        post(index)
    post("last")
    assert owner.done.wait(10)
    driver.stop()
    driver.stop()
    assert owner.seen == [*range(1000), "last"]


def test_thread_driver_tells_death_once_and_calls_no_more() -> None:
    owner, died, deaths = Recorder(), threading.Event(), []

    def on_death(error: BaseException) -> None:
        deaths.append(error)
        died.set()

    driver = ThreadDriver(EventWaiter(), "engine", on_death)
    driver.start(owner)
    driver.post("die")
    assert died.wait(10)
    driver.post("after")
    driver.stop()
    assert [str(error) for error in deaths] == ["told to die"] and owner.seen == []


def test_loop_inbox_delivers_in_order_from_another_thread() -> None:
    async def main() -> list[object]:
        seen: list[object] = []
        done = asyncio.Event()

        def deliver(message: object) -> None:
            seen.append(message)
            if message == 999:
                done.set()

        inbox = LoopInbox(asyncio.get_running_loop(), deliver)

        def send() -> None:
            for index in range(1000):
                inbox.post(index)

        thread = threading.Thread(target=send)
        thread.start()
        await done.wait()
        thread.join()
        return seen

    assert asyncio.run(main()) == list(range(1000))


def run_loop_driver(seed: int) -> list[str]:
    async def main() -> list[str]:
        loop, source = asyncio.get_running_loop(), random.Random(seed)
        owner = Recorder()
        driver = LoopDriver(loop, source.random, "engine", lambda error: None)
        driver.start(owner)
        a, b = driver.port("a"), driver.port("b")
        for index in range(50):
            a(f"a{index:02}")
            b(f"b{index:02}")
        await asyncio.sleep(60)
        return [str(message) for message in owner.seen]

    return run_virtual(main())


def test_loop_driver_keeps_the_order_of_each_sender_only() -> None:
    seen = run_loop_driver(1)
    for sender in "ab":
        assert [message for message in seen if message[0] == sender] == [f"{sender}{i:02}" for i in range(50)]
    assert seen != sorted(seen, key=lambda message: message[1:]), "senders overtake each other"
    assert run_loop_driver(1) == run_loop_driver(1)
    assert run_loop_driver(1) != run_loop_driver(2)


def test_loop_driver_takes_turns_when_they_are_due() -> None:
    async def main() -> int:
        owner = Recorder(wait_s=1.0)
        driver = LoopDriver(asyncio.get_running_loop(), lambda: 0.001, "engine", lambda error: None)
        driver.start(owner)
        await asyncio.sleep(10.5)
        driver.stop()
        num_turns = owner.num_turns
        await asyncio.sleep(10)
        assert owner.num_turns == num_turns
        return num_turns

    assert run_virtual(main()) == 11


def test_loop_driver_paused_holds_messages_and_goes_on() -> None:
    async def main() -> list[object]:
        owner = Recorder()
        driver = LoopDriver(asyncio.get_running_loop(), lambda: 0.001, "engine", lambda error: None)
        driver.start(owner)
        driver.pause()
        driver.post(1)
        driver.post(2)
        driver.wake()
        await asyncio.sleep(1)
        assert (owner.seen, owner.num_turns) == ([], 0)
        driver.resume()
        await asyncio.sleep(1)
        assert owner.num_turns == 1
        return owner.seen

    assert run_virtual(main()) == [1, 2]


def test_loop_driver_tells_death_and_calls_no_more() -> None:
    async def main() -> tuple[list[str], list[object]]:
        owner, deaths = Recorder(), []
        loop = asyncio.get_running_loop()
        driver = LoopDriver(loop, lambda: 0.001, "engine", lambda error: deaths.append(str(error)))
        driver.start(owner)
        for message in (1, "die", 2):
            driver.post(message)
        await asyncio.sleep(1)
        return deaths, owner.seen

    assert run_virtual(main()) == (["told to die"], [1])


def test_delayed_inbox_keeps_order_and_holds_while_paused() -> None:
    async def main() -> list[object]:
        seen: list[object] = []
        inbox = DelayedInbox(asyncio.get_running_loop(), random.Random(3).random, seen.append)
        for index in range(20):
            inbox.post(index)
        await asyncio.sleep(0.5)
        inbox.pause()
        num_seen = len(seen)
        await asyncio.sleep(5)
        assert len(seen) == num_seen
        inbox.resume()
        inbox.post("last")
        await asyncio.sleep(5)
        inbox.stop()
        inbox.post("never")
        await asyncio.sleep(5)
        return seen

    assert run_virtual(main(), VirtualClock()) == [*range(20), "last"]
