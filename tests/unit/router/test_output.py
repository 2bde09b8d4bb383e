"""The buffer between a request and its client."""

from __future__ import annotations

import asyncio

import pytest

from pdserve.errors import RequestCancelled, WorkerLost
from pdserve.request import Event, Tokens
from router.output import Output
from tests.support.virtual_loop import VirtualLoop
from tests.unit.router.scripted import Cluster, virtual


def output(stalled: list[float] | None = None) -> Output:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    clock = loop.clock
    seen = stalled if stalled is not None else []
    return Output(clock, 3.0, lambda: seen.append(clock.now_s()))


def tokens(first_index: int, *ids: int, choice: int = 0) -> Tokens:
    return Tokens(choice=choice, first_index=first_index, token_ids=ids, text=bytes(ids).decode())


async def take(out: Output) -> Event | None:
    return await out.take()


@virtual
async def test_tokens_that_were_not_taken_join_per_choice() -> None:
    out = output()
    out.put(tokens(0, 97))
    out.put(tokens(1, 98, 99))
    out.put(tokens(0, 100, choice=1))
    out.put(tokens(3, 101))
    out.end()
    assert await take(out) == tokens(0, 97, 98, 99)
    assert await take(out) == tokens(0, 100, choice=1)
    assert await take(out) == tokens(3, 101)
    assert out.complete
    assert await take(out) is None


@virtual
async def test_an_error_comes_behind_what_lies_there() -> None:
    out = output()
    out.put(tokens(0, 97))
    out.fail(WorkerLost("gone"))
    out.fail(RequestCancelled("too late"))
    assert await take(out) == tokens(0, 97)
    with pytest.raises(WorkerLost):
        await take(out)
    assert not out.complete


@virtual
async def test_the_stall_is_counted_from_the_oldest_event_left_lying() -> None:
    stalled: list[float] = []
    out = output(stalled)
    begun_s = asyncio.get_running_loop().time()
    out.put(tokens(0, 97))
    await asyncio.sleep(2)
    out.put(tokens(0, 98, choice=1))
    await take(out)
    await asyncio.sleep(2.9)
    assert not stalled
    await asyncio.sleep(0.2)
    assert stalled == [pytest.approx(begun_s + 5)]
    out.close()


@virtual
async def test_nothing_lying_there_is_no_stall() -> None:
    stalled: list[float] = []
    out = output(stalled)
    out.put(tokens(0, 97))
    await take(out)
    await asyncio.sleep(100)
    assert not stalled


@virtual
async def test_a_reader_that_waits_is_woken_by_event_and_end() -> None:
    out = output()
    async with asyncio.TaskGroup() as group:
        first = group.create_task(take(out))
        await asyncio.sleep(1)
        out.put(tokens(0, 97))
    assert first.result() == tokens(0, 97)
    async with asyncio.TaskGroup() as group:
        second = group.create_task(take(out))
        await asyncio.sleep(1)
        out.end()
    assert second.result() is None


@virtual
async def test_a_client_that_leaves_after_the_last_event_has_not_cancelled_anything() -> None:
    from pdserve.messages import Abort, StartDecode, StartPrefill
    from pdserve.request import Finished
    from pdserve.sampling import FinishReason

    async with Cluster() as cluster:
        p, d = await cluster.pair()
        request = cluster.generate("hello", max_tokens=1)
        start = await d.expect(StartDecode)
        d.grant(start)
        p.first(await p.expect(StartPrefill), 97, FinishReason.LENGTH)
        while not (request.events and isinstance(request.events[-1], Finished)):
            await cluster.settle(0.001)
        request.generation.close()
        await request.end()
        value = cluster.app.metrics.registry.get_sample_value("pdserve_requests_total", {"status": "OK"})
        assert value == 1 and len(d.got(Abort)) <= 1
