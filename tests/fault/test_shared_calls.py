"""Many requests over one call, real processes: each goes its own way, whatever becomes of the others."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from pathlib import Path
from random import Random

import pytest

from pdserve.client import AsyncClient
from pdserve.errors import DeadlineExceeded, Draining, RequestCancelled
from pdserve.request import Event, Tokens
from pdserve.service.targets import RouterLost
from tests.support.asking import Question, ask, at_rest
from tests.support.singles import Single, Singles
from tests.support.waiting import until

HEARTBEAT_S = 0.1
STALL_S = 1.5
LONG = 2_000
FLAGS = ("--timeouts.heartbeat-s", f"{HEARTBEAT_S}", "--timeouts.client-stall-s", f"{STALL_S}")
FAKE = ("--engine", "fake", "--engine.num-blocks", "8192", "--engine.fake-step-s", "0.001")
SLOW = (*FAKE[:-1], "0.005")  # no stream is through when all have begun


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Singles]:
    with Singles(tmp_path_factory.mktemp("shared"), *FLAGS) as made:
        made.router("r0", "--router.max-shared-calls", "1")
        made.worker("prefill", "p0", *FAKE)
        made.worker("decode", "d0", *FAKE)
        yield made.start()


def questions(number: int, max_tokens: int = 60) -> list[Question]:
    random = Random("shared")
    return [Question.draw(random, random.randrange(3, 60), max_tokens + each) for each in range(number)]


async def rested(router: Single) -> None:
    async with AsyncClient(router.address) as client:
        await at_rest(client, ["d0", "p0"], heartbeat_s=HEARTBEAT_S)


async def read(events: AsyncGenerator[Event, None], num_events: int) -> list[int]:
    """So many events with tokens, or all that are left."""
    got: list[int] = []
    async for event in events:
        if isinstance(event, Tokens):
            got.extend(event.token_ids)
            num_events -= 1
            if not num_events:
                break
    return got


async def test_fifty_answers_over_one_call_are_those_of_fifty_calls(cluster: Singles) -> None:
    router = cluster.routers[0]
    await rested(router)
    async with AsyncClient(router.address, shares_calls=True) as client:
        asked = questions(50)
        first = asyncio.create_task(ask(client, asked[0]))

        async def shares() -> bool:
            return await router.metric("pdserve_shared_calls") == 1

        await until("the call is open", shares)
        await asyncio.gather(first, *(ask(client, each) for each in asked[1:]))
    await rested(router)


async def test_a_second_client_than_the_router_has_such_calls_for_asks_call_by_call(cluster: Singles) -> None:
    router = cluster.routers[0]
    await rested(router)
    async with (
        AsyncClient(router.address, shares_calls=True) as one,
        AsyncClient(router.address, shares_calls=True) as other,
    ):
        question = Question(prompt_ids=(1, 2, 3), max_tokens=LONG, seed=1)
        async with aclosing(one.generate(question.request)) as events:
            await read(events, 1)
            await asyncio.gather(*(ask(other, each) for each in questions(5)))
    await rested(router)


async def test_who_reads_slowly_misses_nothing_and_who_stands_still_is_given_up_alone(
    cluster: Singles,
) -> None:
    router = cluster.routers[0]
    await rested(router)
    slow = Question(prompt_ids=(1, 2, 3), max_tokens=LONG, seed=1)
    still = Question(prompt_ids=(3, 2, 1), max_tokens=LONG, seed=2)
    async with AsyncClient(router.address, shares_calls=True) as client:
        stalled = client.generate(still.request)
        async with aclosing(stalled), aclosing(client.generate(slow.request)) as events:
            begun = await read(stalled, 1)
            got = await read(events, 1)

            async def given_up() -> bool:
                # Others read on meanwhile, over the same call.
                got.extend(await read(events, 8))
                await asyncio.gather(*(ask(client, each) for each in questions(3)))
                return await router.metric("pdserve_requests_total", status="CANCELLED") > cancelled

            cancelled = await router.metric("pdserve_requests_total", status="CANCELLED")
            await until("the one that stands still is given up", given_up)
            got.extend(await read(events, LONG))
            assert got == slow.answer, "nothing is missing behind what lay"
            with pytest.raises(RequestCancelled, match="doesn't read"):
                while more := await read(stalled, 1):
                    begun.extend(more)
            assert begun == still.answer[: len(begun)]
    await rested(router)


async def test_who_leaves_ends_its_own_request_only(cluster: Singles) -> None:
    router = cluster.routers[0]
    await rested(router)
    async with AsyncClient(router.address, shares_calls=True) as client:
        others = [asyncio.create_task(ask(client, each)) for each in questions(10, 300)]
        question = Question(prompt_ids=(1, 2, 3), max_tokens=LONG * 4, seed=1)
        cancelled = await router.metric("pdserve_requests_total", status="CANCELLED")
        async with aclosing(client.generate(question.request)) as events:
            await read(events, 1)

        async def gone() -> bool:
            return await router.metric("pdserve_requests_total", status="CANCELLED") == cancelled + 1

        await until("it has ended", gone)
        await asyncio.gather(*others)
    await rested(router)


async def test_one_whose_time_is_over_ends_by_itself(cluster: Singles) -> None:
    router = cluster.routers[0]
    await rested(router)
    async with AsyncClient(router.address, shares_calls=True) as client:
        others = [asyncio.create_task(ask(client, each)) for each in questions(5, 300)]
        question = Question(prompt_ids=(1, 2, 3), max_tokens=LONG * 4, seed=1)
        with pytest.raises(DeadlineExceeded):
            await read(client.generate(question.request, deadline_s=0.3), 100_000)
        await asyncio.gather(*others)
    await rested(router)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_a_router_that_stops_serves_what_it_has_and_one_that_dies_is_told_by_each(
    number: signal.Signals, tmp_path: Path
) -> None:
    with Singles(tmp_path, *FLAGS) as made:
        router = made.router("r0")
        made.worker("prefill", "p0", *SLOW)
        made.worker("decode", "d0", *SLOW)
        made.start()
        await rested(router)
        async with AsyncClient(router.address, shares_calls=True) as client:
            asked = questions(20, 400)
            begun = asyncio.Semaphore(0)
            streams = [
                asyncio.create_task(ask(client, each, lambda num: begun.release() if num == 1 else None))
                for each in asked
            ]
            for _ in asked:
                await begun.acquire()
            router.send(number)
            ends = await asyncio.gather(*streams, return_exceptions=True)
            if number is signal.SIGTERM:
                assert [each for each in ends if isinstance(each, BaseException)] == []
                with pytest.raises((Draining, RouterLost)):
                    await ask(client, asked[0])
                assert await asyncio.to_thread(router.wait) == 0
            else:
                assert {type(each) for each in ends} <= {RouterLost, type(ends[0])}
                assert any(isinstance(each, RouterLost) for each in ends)
