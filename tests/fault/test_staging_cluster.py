"""A cluster of workers that stage and others that don't: every text is right while both ends die."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from pdserve.client import AsyncClient
from tests.support.asking import Question, ask, at_rest
from tests.support.singles import Single, Singles
from tests.support.waiting import until

HEARTBEAT_S = 0.1
FLAGS = ("--timeouts.heartbeat-s", f"{HEARTBEAT_S}", "--engine", "fake", "--transport.kinds", "stream",
         "--engine.num-blocks", "2048")  # fmt: skip
STAGED = ("p0", "d0")


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[dict[str, Single]]:
    """As on a GPU and as on a CPU, one of each in each role, and their router."""
    with Singles(tmp_path) as singles:
        made = {"r0": singles.router("r0", "--timeouts.heartbeat-s", f"{HEARTBEAT_S}")}
        for role, name in (("prefill", "p0"), ("prefill", "p1"), ("decode", "d0"), ("decode", "d1")):
            made[name] = singles.worker(role, name, *FLAGS)
            made[name].environ = {"PDSERVE_STAGING": "double"} if name in STAGED else {}
        singles.start()
        yield made


@pytest.mark.slow
async def test_both_ends_die_and_every_text_is_right(workers: dict[str, Single]) -> None:
    random = Random(5)
    router = workers.pop("r0")
    async with AsyncClient(router.address) as client:
        await at_rest(client, workers, heartbeat_s=HEARTBEAT_S)
        for victim in STAGED:
            asked = [asyncio.create_task(ask(client, Question.draw(random, 2_000, 20))) for _ in range(16)]
            before = [await workers[name].metric("pdserve_kv_transfer_bytes_total") for name in ("d0", "d1")]

            async def moves(before: list[float] = before) -> bool:
                now = [await workers[name].metric("pdserve_kv_transfer_bytes_total") for name in ("d0", "d1")]
                return all(later > sooner for later, sooner in zip(now, before, strict=True))

            await until("blocks move to both", moves)
            workers[victim].kill()
            finished = await asyncio.gather(*asked)
            assert {each.transport for each in finished} <= {"stream-unix", ""}
            workers[victim].start()
            await at_rest(client, workers, heartbeat_s=HEARTBEAT_S)
        for name in STAGED:
            assert await workers[name].metric("pdserve_kv_staging_bytes") == 0
            assert await workers[name].metric("pdserve_kv_staging_copies") == 0
