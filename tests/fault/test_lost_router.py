"""One of two routers is killed, or leaves, under its clients: they go on at the other (failures.md, rows 13 and 23)."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from random import Random

import pytest

from pdserve.client import AsyncClient
from tests.support.asking import Question, ask, at_rest
from tests.support.singles import Singles

HEARTBEAT_S = 0.1
FAKE = ("--engine", "fake", "--engine.num-blocks", "2048")
WORKERS = ["p0", "d0", "d1"]
NUM_CLIENTS = 12


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Singles]:
    """Two routers that share a prefill and two decode workers."""
    with Singles(tmp_path_factory.mktemp("routers"), "--timeouts.heartbeat-s", f"{HEARTBEAT_S}") as made:
        made.router("r0", "--timeouts.drain-s", "0.2")  # its streams don't end in that time
        made.router("r1")
        made.worker("prefill", "p0", *FAKE)
        made.worker("decode", "d0", *FAKE)
        made.worker("decode", "d1", *FAKE)
        yield made.start()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "leaves"])
async def test_its_clients_go_on_at_the_other(cluster: Singles, number: signal.Signals) -> None:
    r0, r1 = cluster.routers
    random = Random(number.name)
    questions = [Question.draw(random, random.randrange(20, 400), 1_000) for _ in range(NUM_CLIENTS)]
    async with AsyncClient(r0.address) as first, AsyncClient(r1.address) as second:
        for client in (first, second):
            await at_rest(client, WORKERS, heartbeat_s=HEARTBEAT_S)
        before = await r1.metric("pdserve_requests_total")
        streaming = asyncio.Semaphore(0)
        has_begun: list[set[int]] = [set() for _ in questions]
        # One client each, that would go to r0 first, and one that stays at r1.
        clients = [AsyncClient([r0.address, r1.address]) for _ in questions]
        stays = asyncio.create_task(ask(second, Question.draw(random, 50, 1_500)))

        def tell_begun(index: int, num_tokens: int) -> None:
            if num_tokens >= 10 and not has_begun[index]:
                has_begun[index].add(num_tokens)
                streaming.release()

        answers = [
            asyncio.create_task(ask(client, question, lambda n, index=index: tell_begun(index, n)))  # type: ignore[misc]
            for index, (client, question) in enumerate(zip(clients, questions))
        ]
        for _ in range(NUM_CLIENTS // 2):
            await streaming.acquire()
        r0.send(number)
        for answer in answers:
            await answer
        assert await r1.metric("pdserve_requests_total") > before, "nobody had to go on at the other router"
        assert (await stays).num_attempts == 1
        for client in clients:
            await client.close()
        assert await asyncio.to_thread(r0.wait) == (0 if number is signal.SIGTERM else -signal.SIGKILL)
        await at_rest(second, WORKERS, heartbeat_s=HEARTBEAT_S)
        r0.start()
        await at_rest(first, WORKERS, heartbeat_s=HEARTBEAT_S)
        # Whoever had only the lost router's address finds it again at the same place.
        await ask(first, questions[0])
