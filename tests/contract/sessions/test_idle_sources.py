"""What a session sends when nothing else waits, over gRPC and in memory alike: a worker's block events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager

import pytest

from pdserve import messages as m
from pdserve.block_messages import BlockEvents
from pdserve.errors import WorkerLost
from pdserve.messages import Up
from tests.contract.sessions.wires import Wire, grpc_wire, memory_wire

HASHES = tuple(n.to_bytes(16, "big") for n in range(1024))


@pytest.fixture(params=[grpc_wire, memory_wire], ids=["grpc", "memory"])
async def wire(request: pytest.FixtureRequest) -> AsyncIterator[Wire]:
    open_wire: Callable[[], AbstractAsyncContextManager[Wire]] = request.param
    async with asyncio.timeout(60), open_wire() as wire:
        yield wire


class Source:
    """Gives this many messages. at: called with how many it has given before the next one."""

    def __init__(self, num_messages: int, at: Callable[[int], None] = lambda _: None) -> None:
        self.num_left = num_messages
        self.num_given = 0
        self.at = at

    def take(self) -> Up | None:
        if not self.num_left:
            return None
        self.at(self.num_given)
        self.num_left -= 1
        self.num_given += 1
        return BlockEvents(whole=self.num_given == 1, stored=HASHES, removed=())


async def test_it_is_asked_at_once_and_again_when_it_says_so(wire: Wire) -> None:
    source = Source(3)
    wake = wire.worker.when_idle(source.take)
    assert [getattr(await wire.router.receive(), "whole", None) for _ in range(3)] == [True, False, False]
    wire.worker.send(m.Credits(1))
    assert await wire.router.receive() == m.Credits(1)
    source.num_left = 1
    wake()
    assert isinstance(await wire.router.receive(), BlockEvents)


async def test_what_is_sent_meanwhile_waits_for_none_of_the_rest(wire: Wire) -> None:
    """100,000 blocks are 98 messages; a token goes out behind those that the source has given by then."""
    step = m.Step((m.StepTokens(7, 0, (5,)),))
    source = Source(98)
    source.at = lambda num_given: wire.worker.send(step) if num_given == 10 else None
    wire.worker.when_idle(source.take)
    kinds = [type(await wire.router.receive()) for _ in range(99)]
    assert kinds.index(m.Step) == 11 and kinds.count(BlockEvents) == 98


async def test_it_is_not_asked_further_than_the_reader_reads(wire: Wire) -> None:
    """The router never reads: what it is to be told stays with the source, and the session lives."""
    source = Source(100_000)
    wire.worker.when_idle(source.take)
    num_given = -1
    while source.num_given > num_given:
        num_given = source.num_given
        for _ in range(500):
            await asyncio.sleep(0)
        wire.worker.send(m.Credits(num_given))
    assert source.num_left > 0
    assert isinstance(await wire.router.receive(), BlockEvents)


async def test_a_session_that_closes_does_not_wait_for_it(wire: Wire) -> None:
    source = Source(1_000_000)
    wire.worker.when_idle(source.take)
    await wire.router.receive()
    wire.worker.send(m.Credits(1))
    wire.worker.close("drained")
    num_given, kinds = source.num_given, set()
    with pytest.raises(WorkerLost):
        while True:
            kinds.add(type(await wire.router.receive()))
    assert m.Credits in kinds
    assert source.num_given == num_given
