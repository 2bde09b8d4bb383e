"""A router moves to another address, where there is no DNS: its workers follow the file that names it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from random import Random

from pdserve.client import AsyncClient
from tests.support.asking import Question, ask, at_rest
from tests.support.singles import Single, Singles
from tests.support.waiting import until

HEARTBEAT_S = 0.1
FAKE = ("--engine", "fake", "--engine.num-blocks", "256")


def name_in(file: Path, *routers: Single) -> None:
    """As an operator's tool should: in one step."""
    scratch = file.with_suffix(".new")
    scratch.write_text("".join(f"{router.operators}  # {router.id}\n" for router in routers))
    scratch.replace(file)


async def test_workers_follow_the_file_of_routers(tmp_path: Path) -> None:
    file, random = tmp_path / "routers", Random(7)
    with Singles(tmp_path, "--timeouts.heartbeat-s", f"{HEARTBEAT_S}") as cluster:
        before = cluster.router("r0")
        after = cluster.router("r1")
        workers = [
            cluster.worker(role, name, *FAKE, routers_file=file)
            for role, name in (("prefill", "p0"), ("decode", "d0"))
        ]
        for each in (before, *workers):  # nobody has written the file yet
            each.start()
        for worker in workers:
            await until("the missing file is told", partial(_is_told, worker), told=worker.log_tail)
        name_in(file, before)
        await _serves(before, random)
        before.kill()
        after.start()
        file.write_text("not an address\n")  # such a file changes nothing
        name_in(file, after)
        await _serves(after, random)
        for worker in workers:
            assert worker.runs
            assert worker.terminate() == 0


async def _is_told(worker: Single) -> bool:
    return '"router.unresolved"' in worker.log_tail(100_000)


async def _serves(router: Single, random: Random) -> None:
    async with AsyncClient(router.address) as client:
        await at_rest(client, ["p0", "d0"], heartbeat_s=HEARTBEAT_S)
        await ask(client, Question.draw(random, 100, 20))
