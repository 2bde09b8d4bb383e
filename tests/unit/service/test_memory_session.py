"""What only the in-memory session can do: delays, cuts, stalls and resets in virtual time."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from pdserve import messages as m
from pdserve.errors import WorkerLost
from pdserve.session import Session
from tests.support.memory_session import LINGER_S, MemoryWire
from tests.support.virtual_clock import VirtualClock
from tests.support.virtual_loop import VirtualLoop


class World:
    """One wire on a virtual loop, its messages taking 10 ms each way."""

    def __init__(self, delay_s: float = 0.01) -> None:
        self.clock = VirtualClock(0.0)
        self.loop = VirtualLoop(self.clock, limit_s=100.0)
        self.source = random.Random(5)
        self.wire = MemoryWire(self.loop.call_later, lambda: delay_s, silent_s=2.0, outbox_limit=100)
        self.worker, self.router = self.wire.worker_end, self.wire.router_end

    def receive(self, session: Session[Any, Any]) -> Any:
        return self.loop.run_until_complete(session.receive())

    def lost(self, session: Session[Any, Any]) -> str:
        with pytest.raises(WorkerLost) as caught:
            self.receive(session)
        return str(caught.value)


@pytest.fixture
def world() -> World:
    return World()


def test_a_message_takes_its_delay(world: World) -> None:
    world.worker.send(m.Credits(1))
    assert world.receive(world.router) == m.Credits(1)
    assert world.clock.now_s() == pytest.approx(0.01)


def test_messages_fly_together_and_in_order() -> None:
    world = World()
    delays = iter([0.05, 0.01, 0.02])
    wire = MemoryWire(world.loop.call_later, lambda: next(delays))
    for n in (1, 2, 3):
        wire.worker_end.send(m.Waiting(n, 0))
    assert [world.receive(wire.router_end).handle for _ in range(3)] == [1, 2, 3]
    assert world.clock.now_s() == pytest.approx(0.05)


@pytest.mark.parametrize(("up", "down"), [(True, False), (False, True), (True, True)])
def test_a_cut_of_either_way_ends_both_sides_after_keepalive(world: World, up: bool, down: bool) -> None:
    world.wire.cut(up=up, down=down)
    world.worker.send(m.Credits(1))
    if not up:
        assert world.receive(world.router) == m.Credits(1)
    assert "keepalive" in world.lost(world.router)
    assert world.clock.now_s() == pytest.approx(2.0)
    assert "keepalive" in world.lost(world.worker)


def test_a_cut_that_heals_in_time_loses_nothing(world: World) -> None:
    world.worker.send(m.Waiting(1, 0))
    world.wire.cut()
    world.worker.send(m.Waiting(2, 0))
    world.loop.call_later(1.5, world.wire.heal)
    assert world.receive(world.router) == m.Waiting(1, 0)
    assert world.receive(world.router) == m.Waiting(2, 0)
    assert world.clock.now_s() == pytest.approx(1.51)
    world.router.send(m.Drain())
    assert world.receive(world.worker) == m.Drain()


def test_a_close_behind_a_cut_is_learned_when_it_heals(world: World) -> None:
    world.wire.cut()
    world.worker.close("gone")
    world.loop.call_later(1.5, world.wire.heal)
    assert "gone" in world.lost(world.router)
    assert world.clock.now_s() == pytest.approx(1.51)


def test_a_stall_lasts_and_then_delivers(world: World) -> None:
    world.wire.stall(up=True, down=False)
    world.worker.send(m.Credits(1))
    world.router.send(m.Drain())
    assert world.receive(world.worker) == m.Drain()
    world.loop.call_later(50.0, world.wire.heal)
    assert world.receive(world.router) == m.Credits(1)
    assert world.clock.now_s() > 50.0


def test_a_stalled_reader_is_a_slow_consumer(world: World) -> None:
    world.wire.stall()
    for n in range(1, 102):
        world.worker.send(m.Waiting(n, 0))
    assert "slow consumer" in world.lost(world.worker)
    assert "slow consumer" in world.lost(world.router)


def test_a_closed_end_lingers_only_so_long(world: World) -> None:
    world.wire.stall()
    world.worker.send(m.Waiting(1, 0))
    world.worker.close("bye")
    assert "bye" in world.lost(world.router)
    assert world.clock.now_s() == pytest.approx(LINGER_S + 0.01)


def test_a_reset_loses_what_is_on_its_way(world: World) -> None:
    world.worker.send(m.Waiting(1, 0))
    world.loop.call_soon(world.wire.reset)
    assert "reset" in world.lost(world.router)
    assert "reset" in world.lost(world.worker)


def test_equal_seeds_give_equal_times() -> None:
    def trace(seed: int) -> list[tuple[float, int]]:
        world = World()
        source = random.Random(seed)
        wire = MemoryWire(world.loop.call_later, source.random)
        seen: list[tuple[float, int]] = []

        async def read() -> None:
            for _ in range(20):
                message = await wire.router_end.receive()
                assert isinstance(message, m.Waiting)
                seen.append((world.clock.now_s(), message.handle))
                await asyncio.sleep(0.1)

        for n in range(1, 21):
            wire.worker_end.send(m.Waiting(n, 0))
        world.loop.run_until_complete(read())
        return seen

    assert trace(1) == trace(1)
    assert trace(1) != trace(2)


def test_what_a_killed_worker_has_sent_arrives_and_what_it_had_queued_does_not(world: World) -> None:
    world.worker.send(m.Waiting(1, 0))
    world.loop.call_later(0.005, world.worker.send, m.Waiting(2, 0))
    world.loop.call_later(0.005, world.wire.kill_worker)
    world.router.send(m.Drain())
    assert world.receive(world.router) == m.Waiting(1, 0)
    assert "its process is gone" in world.lost(world.router)
    assert "killed" in world.lost(world.worker)


def test_the_end_of_a_killed_router_waits_behind_a_cut(world: World) -> None:
    world.wire.cut()
    world.wire.kill_router()
    world.loop.call_later(1.0, world.wire.heal)
    assert "its process is gone" in world.lost(world.worker)
    assert world.clock.now_s() == pytest.approx(1.01)
