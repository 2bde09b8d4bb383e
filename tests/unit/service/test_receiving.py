"""How many messages may come in at a time, and who makes room for another."""

from __future__ import annotations

import asyncio

import pytest

from pdserve.errors import Overloaded
from pdserve.service.config import load
from pdserve.service.receiving import PATIENCE_S, Receiving, most_at_once
from tests.support.virtual_clock import VirtualClock
from tests.support.virtual_loop import run_virtual

MOST = 4


class Door:
    """Messages that come when the test says so, by their names."""

    def __init__(self, clock: VirtualClock) -> None:
        self.refused = 0
        self.receiving = Receiving(MOST, clock, self._refuse)
        self.num_read = 0
        self.most_read = 0
        self._messages: dict[str, asyncio.Future[bytes]] = {}

    def _refuse(self) -> None:
        self.refused += 1

    def begin(self, name: str, user: str) -> asyncio.Task[bytes]:
        return asyncio.create_task(self.receiving.take(lambda: self._read(name), user))

    async def _read(self, name: str) -> bytes:
        self.num_read += 1
        self.most_read = max(self.most_read, self.num_read)
        try:
            return await self._messages.setdefault(name, asyncio.get_running_loop().create_future())
        finally:
            self.num_read -= 1

    def come(self, name: str) -> None:
        self._messages.setdefault(name, asyncio.get_running_loop().create_future()).set_result(name.encode())


def test_a_crowd_that_never_ends_its_messages_holds_up_nobody_for_long() -> None:
    async def play() -> None:
        door = Door(clock)
        crowd = [door.begin(f"slow {index}", f"user {index}") for index in range(20)]
        await asyncio.sleep(0.5)
        door.come("mine")
        began_s = clock.now_s()
        mine = door.begin("mine", "me")
        assert await mine == b"mine"
        assert clock.now_s() - began_s <= 20 / MOST * PATIENCE_S
        assert door.most_read == MOST
        for task in crowd:
            task.cancel()
        await asyncio.gather(*crowd, return_exceptions=True)
        assert door.num_read == 0

    clock = VirtualClock()
    run_virtual(play(), clock, limit_s=60.0)


def test_who_has_most_makes_room_at_once_and_the_others_stay() -> None:
    async def play() -> None:
        door = Door(clock)
        own = door.begin("b", "bob")
        greedy = [door.begin(f"a{index}", "alice") for index in range(MOST - 1)]
        await asyncio.sleep(0.01)
        door.come("c")
        began_s = clock.now_s()
        assert await door.begin("c", "carol") == b"c"
        assert clock.now_s() == began_s
        with pytest.raises(Overloaded):
            await greedy[0]
        assert door.refused == 1
        door.come("b")
        assert await own == b"b"
        for task in greedy[1:]:
            task.cancel()
        await asyncio.sleep(0.01)
        assert door.num_read == 0

    clock = VirtualClock()
    run_virtual(play(), clock, limit_s=60.0)


def test_what_is_slow_stays_while_there_is_room() -> None:
    async def play() -> None:
        door = Door(clock)
        tasks = [door.begin(str(index), "alice") for index in range(MOST)]
        await asyncio.sleep(100 * PATIENCE_S)
        for index in range(MOST):
            door.come(str(index))
        assert await asyncio.gather(*tasks) == [str(index).encode() for index in range(MOST)]
        assert door.refused == 0

    clock = VirtualClock()
    run_virtual(play(), clock, limit_s=1000.0)


def test_bodies_of_the_http_door_count_with_their_own_size_while_it_is_open() -> None:
    sizes = {"router.max_receiving_bytes": 256 << 20, "http.max_body_bytes": 64 << 20}
    assert most_at_once(load(flags=sizes), 8 << 20) == 32
    opened = load(flags={**sizes, "http.listen": "127.0.0.1:0"})
    assert (most_at_once(opened, 8 << 20), most_at_once(opened, 128 << 20)) == (4, 2)
    assert most_at_once(load(flags={"router.max_receiving_bytes": 1 << 20}), 8 << 20) == 1
