"""Router, prefill and decode worker in every order of starting, with requests from the first second on."""

from __future__ import annotations

import asyncio
from itertools import permutations
from pathlib import Path
from random import Random

import pytest

from pdserve.client import AsyncClient, RouterLost
from pdserve.request import Finished
from tests.support.asking import Question, ask, at_rest
from tests.support.singles import Single, Singles
from tests.support.waiting import until

FAKE = ("--engine", "fake", "--engine.num-blocks", "256")


async def has_begun(single: Single) -> bool:
    """Whether it logs: it runs its own code and has read its settings."""
    return single.log.exists() and b'"event"' in single.log.read_bytes()


@pytest.mark.parametrize("order", list(permutations(("r0", "p0", "d0"))), ids="-".join)
async def test_any_order_serves(tmp_path: Path, order: tuple[str, ...]) -> None:
    with Singles(tmp_path) as cluster:
        router = cluster.router("r0")
        cluster.worker("prefill", "p0", *FAKE)
        cluster.worker("decode", "d0", *FAKE)
        async with AsyncClient(router.address) as client:
            question = Question.draw(Random("-".join(order)), 100, 20)

            async def ask_whoever_is_there() -> Finished | None:
                try:
                    return await ask(client, question)
                except RouterLost:  # no router listens yet
                    return None

            answers = [asyncio.create_task(until("an answer", ask_whoever_is_there)) for _ in range(3)]
            for name in order:
                single = cluster.all[name].start()
                await until(f"{name} has begun", lambda single=single: has_begun(single))  # type: ignore[misc]
            for answer in answers:
                assert (await answer).num_attempts == 1
            await at_rest(client, ["p0", "d0"])
