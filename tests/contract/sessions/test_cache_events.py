"""Cache events over gRPC and in memory: order, snapshots on request, the end of the stream."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest

from pdserve.block_messages import BlocksRemoved, BlocksStored, CacheEvent, SnapshotPart
from pdserve.errors import WorkerLost
from pdserve.service.cache_events import CacheEvents
from tests.contract.sessions.wires import WORKER, grpc_server, make_dialer, no_session
from tests.support.footprint import Footprint
from tests.support.memory_session import MemoryCacheEvents
from tests.support.waiting import until

HASHES = tuple(bytes([n]) * 16 for n in range(4))


class ListSource:
    """A source that is told what to say; on `snapshot` it says the whole set again."""

    def __init__(self) -> None:
        self.sequence = 0
        self.waiting: deque[CacheEvent] = deque()
        self.closed = asyncio.Event()
        self.taken = asyncio.Event()
        self.wake: Callable[[], None] = lambda: None

    def subscribe(self, wake: Callable[[], None]) -> ListSource:
        self.wake = wake
        self.snapshot()
        return self

    def say(self, kind: type[BlocksStored] | type[BlocksRemoved], *hashes: bytes) -> None:
        self.sequence += 1
        self.waiting.append(kind(self.sequence, hashes))
        self.wake()

    def snapshot(self) -> None:
        self.sequence += 1
        self.waiting.append(SnapshotPart(self.sequence, HASHES[:2], True, True))
        self.wake()

    def take(self) -> CacheEvent | None:
        self.taken.set()
        return self.waiting.popleft() if self.waiting else None

    def close(self) -> None:
        self.closed.set()


@asynccontextmanager
async def over_grpc(source: ListSource) -> AsyncIterator[CacheEvents]:
    opened: asyncio.Future[CacheEvents] = asyncio.get_running_loop().create_future()
    over = asyncio.Event()

    async def on_cache_events(events: CacheEvents) -> None:
        opened.set_result(events)
        await over.wait()

    async def send(address: str, tasks: asyncio.TaskGroup) -> None:
        with pytest.raises(WorkerLost, match="ended the cache events"):
            await make_dialer(tasks).send_cache_events(address, source.subscribe)

    async with (
        asyncio.TaskGroup() as tasks,
        grpc_server(no_session, tasks, on_cache_events=on_cache_events) as address,
    ):
        sending = tasks.create_task(send(address, tasks))
        yield await opened
        over.set()
        await sending


@asynccontextmanager
async def in_memory(source: ListSource) -> AsyncIterator[CacheEvents]:
    events = MemoryCacheEvents(WORKER, source.subscribe, asyncio.get_running_loop().call_later, lambda: 1e-4)
    yield events
    events.close()


@pytest.mark.parametrize("open_stream", [over_grpc, in_memory], ids=["grpc", "memory"])
async def test_events_arrive_in_order_and_a_snapshot_when_asked(
    open_stream: Callable[[ListSource], AbstractAsyncContextManager[CacheEvents]],
) -> None:
    source = ListSource()
    async with asyncio.timeout(60):
        async with open_stream(source) as events:
            assert events.worker == WORKER
            assert await events.receive() == SnapshotPart(1, HASHES[:2], True, True)
            source.say(BlocksStored, HASHES[2], HASHES[3])
            source.say(BlocksRemoved, HASHES[0])
            assert await events.receive() == BlocksStored(2, (HASHES[2], HASHES[3]))
            assert await events.receive() == BlocksRemoved(3, (HASHES[0],))
            events.ask_snapshot()
            assert await events.receive() == SnapshotPart(4, HASHES[:2], True, True)
        await source.closed.wait()


async def test_the_end_of_the_worker_is_worker_lost() -> None:
    source = ListSource()
    first, lost = asyncio.Event(), asyncio.Event()

    async def on_cache_events(events: CacheEvents) -> None:
        await events.receive()
        first.set()
        with pytest.raises(WorkerLost):
            await events.receive()
        lost.set()

    async with (
        asyncio.timeout(60),
        asyncio.TaskGroup() as tasks,
        grpc_server(no_session, tasks, on_cache_events=on_cache_events) as address,
    ):
        sending = tasks.create_task(make_dialer(tasks).send_cache_events(address, source.subscribe))
        await first.wait()
        sending.cancel()
        await lost.wait()
    assert source.closed.is_set()


@pytest.mark.parametrize("when", ["while it writes", "while it waits", "when the router ends it"])
async def test_an_ended_stream_closes_its_connection_without_the_garbage_collector(when: str) -> None:
    """A worker that changes its role often would hold dozens of dead connections open, and its routers with it."""
    num_read = asyncio.Semaphore(0)

    async def read(events: CacheEvents) -> None:
        with contextlib.suppress(WorkerLost):
            while when != "when the router ends it":
                await events.receive()
                num_read.release()

    async def is_as_before() -> bool:
        return Footprint.of(os.getpid()).num_sockets <= before

    async with asyncio.TaskGroup() as tasks, grpc_server(no_session, tasks, on_cache_events=read) as address:
        dialer = make_dialer(tasks)
        gc.collect()
        gc.disable()
        try:
            before = Footprint.of(os.getpid()).num_sockets
            for _ in range(5):
                source = ListSource()
                sending = asyncio.create_task(dialer.send_cache_events(address, source.subscribe))
                if when == "while it writes":
                    await source.taken.wait()
                if when == "while it waits":
                    await num_read.acquire()
                if when != "when the router ends it":
                    sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)
                del sending, source
            await until("all connections are closed", is_as_before)
        finally:
            gc.enable()
