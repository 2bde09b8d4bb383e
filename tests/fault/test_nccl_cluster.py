"""A cluster over NCCL's double: every text is right whatever dies, and what others' connectors get wrong, by name."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from random import Random

import pytest

from deploy.local.probe import fetch
from pdserve.client import AsyncClient
from pdserve.request import Tokens
from tests.support.asking import Question, ask, at_rest
from tests.support.singles import Single, Singles
from tests.support.waiting import until

HEARTBEAT_S = 0.1
FLAGS = ("--timeouts.heartbeat-s", f"{HEARTBEAT_S}", "--engine", "fake", "--transport.kinds", "nccl,stream",
         "--transport.strict", "true", "--engine.num-blocks", "2048")  # fmt: skip
BLOCK = 16


class Cluster:
    """One router, two prefill workers, one decode worker."""

    def __init__(self, singles: Singles) -> None:
        self.router = singles.router("r0", "--timeouts.heartbeat-s", f"{HEARTBEAT_S}")
        self.workers: dict[str, Single] = {}
        for role, name in (("prefill", "p0"), ("prefill", "p1"), ("decode", "d0")):
            worker = self.workers[name] = singles.worker(role, name, *FLAGS)
            worker.environ = {"PDSERVE_NCCL": "double"}
        singles.start()

    async def rest(self, client: AsyncClient) -> None:
        await at_rest(client, self.workers, heartbeat_s=HEARTBEAT_S)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Singles(tmp_path) as singles:
        yield Cluster(singles)


async def test_no_token_is_off_by_a_block(cluster: Cluster) -> None:
    """Around every edge of a block, with the first token appended in the last one or in a new one."""
    random = Random(1)
    async with AsyncClient(cluster.router.address) as client:
        await cluster.rest(client)
        sizes = [blocks * BLOCK + more for blocks in (1, 2, 7, 60) for more in (-1, 0, 1)]
        questions = [Question.draw(random, size, max_tokens) for size in sizes for max_tokens in (2, 17, 18)]
        finished = await asyncio.gather(*[ask(client, question) for question in questions])
        assert {each.transport for each in finished} <= {"nccl", ""}
        assert sum(each.transport == "nccl" for each in finished) >= len(finished) // 2
        await cluster.rest(client)


async def test_the_death_of_a_prefill_worker_is_no_sickness_of_the_decode_worker(cluster: Cluster) -> None:
    """Killed with loads under way: health and readiness of D stay, its process too, and every answer is right."""
    random = Random(2)
    decode, victim = cluster.workers["d0"], cluster.workers["p0"]
    async with AsyncClient(cluster.router.address) as client:
        await cluster.rest(client)
        pid = decode.pid
        for _ in range(3):
            questions = [Question.draw(random, 2_000, 20) for _ in range(12)]
            asked = [asyncio.create_task(ask(client, question)) for question in questions]
            received = await decode.metric("pdserve_kv_transfer_bytes_total")
            await until("blocks move", lambda before=received: _moved(decode, before))  # type: ignore[misc]
            victim.kill()
            for path in ("/healthz", "/readyz"):
                answer = await fetch(decode.metrics, path)
                assert answer is not None and answer[0] == 200, (path, answer)
            await asyncio.gather(*asked)
            victim.start()
            await cluster.rest(client)
        assert decode.runs and decode.pid == pid


async def _moved(decode: Single, before: float) -> bool:
    return await decode.metric("pdserve_kv_transfer_bytes_total") > before


async def test_no_block_is_stranded_when_clients_leave_at_any_moment(cluster: Cluster) -> None:
    """Between the grant and the hand-off, too: the workers are at rest again."""
    random = Random(3)
    async with AsyncClient(cluster.router.address) as client:
        await cluster.rest(client)
        for turns in (0, 1, 3, 10, 30, 100):
            asked = [asyncio.create_task(ask(client, Question.draw(random, 3_000, 50))) for _ in range(8)]
            for _ in range(turns):
                await asyncio.wait(asked, timeout=0.002, return_when=asyncio.FIRST_COMPLETED)
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
        async with aclosing(client.generate(Question.draw(random, 3_000, 50).request)) as events:
            async for event in events:
                if isinstance(event, Tokens):
                    break
        await cluster.rest(client)


async def test_a_stopped_prefill_worker_costs_time_and_no_answer(cluster: Cluster) -> None:
    """Stopped with its sends under way, given up, and continued."""
    random = Random(4)
    decode, victim = cluster.workers["d0"], cluster.workers["p0"]
    async with AsyncClient(cluster.router.address) as client:
        await cluster.rest(client)
        asked = [asyncio.create_task(ask(client, Question.draw(random, 2_000, 20))) for _ in range(12)]
        before = await decode.metric("pdserve_kv_transfer_bytes_total")
        await until("blocks move", lambda: _moved(decode, before))
        with victim.stopped():
            await asyncio.gather(*asked)
        await cluster.rest(client)
        assert decode.terminate() == 0


def test_a_worker_without_a_device_says_what_is_wrong(tmp_path: Path) -> None:
    with Singles(tmp_path) as singles:
        singles.router("r0")
        worker = singles.worker("decode", "d0", *FLAGS).start()
        assert worker.wait() == 2
        assert "the KV pool isn't on a CUDA device" in worker.log_tail()
        worker.send(signal.SIGKILL)
