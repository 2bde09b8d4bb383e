"""A worker is stopped (SIGSTOP) while KV moves over `stream`, given up on by the others, and continued.

What it sent or read before, and what it says when it goes on, must be stale: the client's text is what the rule of the
fake engine says, and no block stays behind anywhere (failures.md, row 9).
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from random import Random

import pytest

from pdserve.client import AsyncClient
from tests.support.asking import Question, ask, at_rest, status_of
from tests.support.mid_pull import in_mid_pull, received_bytes
from tests.support.singles import Single, Singles
from tests.support.waiting import until

HEARTBEAT_S = 0.1
FAKE = ("--engine", "fake", "--engine.num-blocks", "1024", "--timeouts.heartbeat-s", f"{HEARTBEAT_S}")
SMALL_CHUNKS = (
    "--engine.max-step-tokens",
    "2",
)  # a long prompt takes seconds, and its blocks leave all the while
PROMPT_TOKENS, MAX_TOKENS = 8_000, 40


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Singles]:
    """Two prefill and two decode workers; each test leaves all of them running."""
    with Singles(tmp_path_factory.mktemp("stopped")) as made:
        made.router("r0", "--timeouts.heartbeat-s", f"{HEARTBEAT_S}")
        for name in ("p0", "p1"):
            made.worker("prefill", name, *FAKE, *SMALL_CHUNKS)
        for name in ("d0", "d1"):
            made.worker("decode", name, *FAKE)
        yield made.start()


async def are_gone(client: AsyncClient, workers: list[Single]) -> bool:
    status = await status_of(client)
    return status is not None and not {each.id for each in workers} & {each.id for each in status.workers}


@pytest.mark.parametrize("role", ["decode", "prefill"])
@pytest.mark.parametrize("others", ["another takes over", "nobody else is there"])
async def test_stopped_in_mid_pull(cluster: Singles, role: str, others: str) -> None:
    router, workers = cluster.all["r0"], [each for each in cluster.workers if each.role == role]
    question = Question.draw(Random(f"{role} {others}"), PROMPT_TOKENS, MAX_TOKENS)
    async with AsyncClient(router.address) as client:
        await at_rest(client, ["p0", "p1", "d0", "d1"], heartbeat_s=HEARTBEAT_S)
        decodes = [each for each in cluster.workers if each.role == "decode"]
        before = await received_bytes(decodes)
        answer = asyncio.create_task(ask(client, question))
        hit = await until(
            f"a {role} worker in mid-pull",
            lambda: in_mid_pull(workers, decodes, before),
            told=cluster.log_tails,
        )
        stopped = [hit] if others == "another takes over" else workers
        try:
            for each in stopped:
                each.send(signal.SIGSTOP)
            assert not answer.done()
            if len(stopped) == 1:
                finished = await answer
                assert hit.id not in (finished.prefill_worker, finished.decode_worker)
            else:
                await until("all of them are given up", lambda: are_gone(client, stopped))
        finally:
            for each in stopped:
                each.send(signal.SIGCONT)
        finished = await answer
        assert finished.num_attempts > 1
        await at_rest(client, ["p0", "p1", "d0", "d1"], heartbeat_s=HEARTBEAT_S)
