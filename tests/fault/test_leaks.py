"""Workers join and leave a thousand times: nobody holds more files, sockets, threads or memory for it.

A change of role is a leave and a join: the worker ends its sessions and links and opens new ones, and routers and
other workers do their part.
"""

from __future__ import annotations

import asyncio
import platform
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from pdserve.client import AsyncClient
from pdserve.messages import Role
from pdserve.operator_client import OperatorClient
from tests.support.asking import Question, ask, at_rest, status_of
from tests.support.footprint import Footprint, num_thread_heaps
from tests.support.singles import Single, Singles
from tests.support.waiting import until

HEARTBEAT_S = 0.1
FAKE = ("--engine", "fake", "--engine.num-blocks", "256")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Singles]:
    with Singles(tmp_path, "--timeouts.heartbeat-s", f"{HEARTBEAT_S}", "--log.level", "warning") as made:
        made.router("r0")
        made.worker("prefill", "p0", *FAKE)
        made.worker("decode", "d0", *FAKE)
        made.worker("prefill", "w", *FAKE)
        yield made.start()


@pytest.mark.parametrize(
    ("num_first", "num_all"),
    [(20, 60), pytest.param(100, 1_000, marks=[pytest.mark.slow, pytest.mark.timeout(1_200)])],
)
async def test_joining_and_leaving(cluster: Singles, num_first: int, num_all: int) -> None:
    router = cluster.all["r0"]
    async with AsyncClient(router.address) as client, OperatorClient(router.operators) as operator:
        await all_at_rest(client)
        for _ in range(num_first // 2):
            await there_and_back(client, operator)
        await all_at_rest(client)
        before = {each.id: Footprint.of(each.pid) for each in cluster.all.values()}
        for _ in range((num_all - num_first) // 2):
            await there_and_back(client, operator)
        await all_at_rest(client)
        for each in cluster.all.values():
            await holds_no_more(each, before[each.id])


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_restarts_of_the_others(cluster: Singles) -> None:
    """What 20 real restarts of workers, killed or ended, leave in the router and in the worker that stays."""
    stay = [cluster.all["r0"], cluster.all["p0"]]
    random = Random(20)
    async with AsyncClient(cluster.all["r0"].address) as client:
        before: dict[str, Footprint] = {}
        for index in range(20):
            await all_at_rest(client)
            if index == 4:
                before = {each.id: Footprint.of(each.pid) for each in stay}
            await asyncio.gather(*[ask(client, Question.draw(random, 200, 50)) for _ in range(4)])
            worker = cluster.all[("d0", "w")[index % 2]]
            await asyncio.to_thread(worker.kill if index % 4 < 2 else worker.terminate)
            worker.start()
        await all_at_rest(client)
        for each in stay:
            await holds_no_more(each, before[each.id])


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library has other heaps")
async def test_the_threads_of_a_router_share_one_heap(cluster: Singles) -> None:
    """Messages of megabytes that pass from thread to thread leave holes in each thread's heap."""
    async with AsyncClient(cluster.all["r0"].address) as client:
        await all_at_rest(client)
        for seed in range(4):
            await ask(client, Question.draw(Random(seed), 200, 20))
    assert num_thread_heaps(cluster.all["r0"].pid) == 0
    assert num_thread_heaps(cluster.all["p0"].pid) > 0  # by default there are some


async def all_at_rest(client: AsyncClient) -> None:
    await at_rest(client, ["p0", "d0", "w"], heartbeat_s=HEARTBEAT_S)
    await until("both pairs are up", lambda: pairs_up(client, {("p0", "d0"), ("w", "d0")}))


async def there_and_back(client: AsyncClient, operator: OperatorClient) -> None:
    """A leave and a join as a decode worker, and one as a prefill worker."""
    await operator.set_role("w", Role.DECODE)
    await until("w decodes", lambda: pairs_up(client, {("p0", "d0"), ("p0", "w")}))
    await operator.set_role("w", Role.PREFILL)
    await until("w prefills", lambda: pairs_up(client, {("p0", "d0"), ("w", "d0")}))


async def pairs_up(client: AsyncClient, wanted: set[tuple[str, str]]) -> bool:
    status = await status_of(client)
    return status is not None and wanted == {
        (pair.prefill_worker, pair.decode_worker) for pair in status.pairs if pair.up
    }


async def holds_no_more(process: Single, before: Footprint) -> None:
    """What is closing may take a moment."""
    after = before

    async def look() -> bool:
        nonlocal after
        after = Footprint.of(process.pid)
        return after.holds_no_more_than(before)

    await until(
        f"{process.id} holds no more than before", look, told=lambda: f"{before}\n{after}", limit_s=20
    )
    print(f"{process.id}: {before} → {after}")
