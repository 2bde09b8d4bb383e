"""A cluster under load whose workers come and go: 3 prefill workers, 5 decode workers, 2 routers, real gRPC and links.

Pools are so small that decode workers must preempt. Meanwhile workers are killed, leave, join and change their roles.
Every text must be what the rule of the fake engine says, and at the end nobody may hold a block for anybody.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from random import Random

import pytest

from pdserve.client import AsyncClient
from pdserve.operator_client import OperatorClient
from tests.support.asking import Question, ask, at_rest
from tests.support.churn import Churn
from tests.support.singles import Singles
from tests.support.waiting import until

# Ten processes on few cores: an answer may take longer than on a machine of one's own.
PATIENCE = ("--timeouts.grant-s", "4")
FAKE = ("--engine", "fake", "--engine.num-blocks", "96", "--engine.max-step-tokens", "128")
NUM_AT_ONCE = 40
MOST_PROMPT_TOKENS, MOST_NEW_TOKENS = 480, 240


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Singles]:
    with Singles(tmp_path_factory.mktemp("busy"), *PATIENCE) as made:
        for index in range(2):
            made.router(f"r{index}")
        for index in range(3):
            made.worker("prefill", f"p{index}", *FAKE)
        for index in range(5):
            made.worker("decode", f"d{index}", *FAKE)
        yield made.start()


@pytest.mark.parametrize(
    ("num_things", "num_each"),
    [(8, 38), pytest.param(40, 125, marks=[pytest.mark.slow, pytest.mark.timeout(2_400)])],
    ids=["300 requests", "5000 requests"],
)
async def test_every_text_is_right_and_no_block_stays_behind(
    cluster: Singles, num_things: int, num_each: int
) -> None:
    """So many things happen to the workers, each in the midst of so many requests."""
    random = Random(num_things)
    addresses = [router.address for router in cluster.routers]
    workers = [worker.id for worker in cluster.workers]
    clients = [AsyncClient(addresses), AsyncClient(addresses[::-1])]
    operator = OperatorClient([router.operators for router in cluster.routers])
    churn = Churn(cluster, operator, random, FAKE)
    room = asyncio.Semaphore(NUM_AT_ONCE)
    attempts: Counter[int] = Counter()

    async def ask_one(client: AsyncClient, question: Question) -> None:
        async with room:
            attempts[(await ask(client, question)).num_attempts] += 1

    for client in clients:
        await at_rest(client, workers)
    async with asyncio.TaskGroup() as group:
        for done in range(0, num_things * num_each, num_each):
            for index in range(num_each):
                sizes = random.randint(1, MOST_PROMPT_TOKENS), random.randint(1, MOST_NEW_TOKENS)
                group.create_task(ask_one(clients[index % 2], Question.draw(random, *sizes)))
            await until("some answers", _at_least(attempts, done + num_each // 6), limit_s=300)
            await churn.go_on()
    for client in clients:
        await at_rest(client, workers)
        await client.close()
    await operator.close()
    preemptions = sum([await worker.metric("pdserve_preemptions_total") for worker in cluster.workers])
    print(f"attempts {dict(attempts)}, churn {dict(churn.done)}, preemptions {preemptions:.0f}")
    assert attempts.total() == num_things * num_each
    assert preemptions > 0, "the pools are too large for this test"


def _at_least(count: Counter[int], wanted: int) -> Callable[[], Awaitable[bool]]:
    async def look() -> bool:
        return count.total() >= wanted

    return look
