"""A worker that can't trust itself: books that don't add up, and bugs in each of its owners, in real processes.

It ends with code 4, after what is sound; the streams go on at another worker, and each token is right.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from random import Random

import pytest

from pdserve.client import AsyncClient
from pdserve.service.lifecycle import EXIT_UNSOUND
from tests.support.asking import Question, ask, at_rest
from tests.support.singles import Singles
from tests.support.spoiled_worker import NUM_STREAMS

# Steps that take a while, so that all streams are there when it breaks; a second isn't long for a grant where the
# machine has other things to do.
FAKE = ("--engine", "fake", "--engine.num-blocks", "256", "--engine.fake-step-s", "0.005")
PATIENCE = ("--timeouts.grant-s", "4")
NUM_TOKENS = 400

# how many of the streams must go on elsewhere, and what the log says
BOOKS = {"block-of-two": (1, "blocks"), "block-of-nobody": (0, "grants")}
BUGS = {"engine": "engine", "links": "transfer", "session": "loop", "loop": "loop"}


@pytest.mark.parametrize(
    "what",
    [
        *BOOKS,
        "engine",
        "session",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("links", "loop")),
    ],
)
async def test_it_ends_and_its_streams_go_on(tmp_path: Path, what: str) -> None:
    with Singles(tmp_path, *PATIENCE) as cluster:
        router = cluster.router("r0")
        cluster.worker("prefill", "p0", *FAKE)
        spoiled = cluster.spoiled_decode(what, "d0", *FAKE)
        cluster.start()
        await asyncio.gather(*(single.ready() for single in cluster.all.values()))
        random = Random(what)
        async with AsyncClient(router.address) as client:
            questions = [Question.draw(random, 100, NUM_TOKENS) for _ in range(NUM_STREAMS)]
            answers = [asyncio.create_task(ask(client, question)) for question in questions]
            code = await asyncio.to_thread(spoiled.wait)
            assert code == EXIT_UNSOUND, spoiled.log_tail()
            cluster.worker("decode", "d1", *FAKE).start()
            attempts = sorted([(await answer).num_attempts for answer in answers])
            await at_rest(client, ["p0", "d1"])
    lines = [json.loads(line) for line in spoiled.log.read_text().splitlines() if line.startswith("{")]
    if what in BOOKS:
        num_moved, book = BOOKS[what]
        assert attempts == [1] * (NUM_STREAMS - num_moved) + [2] * num_moved
        assert [line["book"] for line in lines if line["event"] == "worker.books_wrong"] == [book]
    else:
        assert attempts == [2] * NUM_STREAMS
        assert [line["owner"] for line in lines if line["event"] == "worker.unsound"] == [BUGS[what]]
