"""`pdserve ray` on one Ray node: from nothing to an answer, asked for twice, and to nothing again."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from random import Random

import pytest

from pdserve.client import AsyncClient
from tests.support.asking import Question, ask
from tests.support.processes import run_cli
from tests.support.ray_cluster import RayNodes, ray_nodes

NAME = ("--name", "small")
FAKE = ("--engine", "fake")

# A Ray head may take a minute to start while other tests run.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def ray_command(nodes: RayNodes, action: str, *args: str) -> str:
    """Standard output of `pdserve ray ACTION`, which must succeed."""
    done = run_cli("ray", action, "--address", nodes.address, *NAME, *args)
    assert done.returncode == 0, done.stderr
    return done.stdout


def address_in(ready: str) -> str:
    """Of the line that `up` prints."""
    return ":".join(ready.split(" is ready at ")[1].split(":", 2)[:2])


async def test_up_twice_is_once_and_down_leaves_nothing() -> None:
    async with ray_nodes() as nodes:
        of_ray = set(nodes.pids())
        ready = ray_command(nodes, "up", *FAKE)
        async with AsyncClient(address_in(ready)) as client:
            await ask(client, Question.draw(Random(1), 40, 16))
        before = json.loads(ray_command(nodes, "status", "--json"))

        assert ray_command(nodes, "up", *FAKE) == ready
        assert json.loads(ray_command(nodes, "status", "--json"))["processes"] == before["processes"]

        other = run_cli("ray", "up", "--address", nodes.address, *NAME, *FAKE, "--engine.block-size", "32")
        assert other.returncode == 1
        assert "engine.block_size is 16, asked for 32" in other.stderr

        assert ray_command(nodes, "down") == "small is down\n"
        gone = run_cli("ray", "status", "--address", nodes.address, *NAME)
        assert gone.returncode == 1 and "no such cluster" in gone.stderr
        ours = {process["pid"] for process in before["processes"]}
        ours |= {process["host_pid"] for process in before["processes"]}
        assert not ours & (set(nodes.pids()) - of_ray)
        again = run_cli("ray", "down", "--address", nodes.address, *NAME)
        assert again.returncode == 1 and "no such cluster" in again.stderr

        ready = ray_command(nodes, "up", *FAKE, "--both", "1", "--http-listen", "127.0.0.1:0")
        assert ": 1 router + 1 both; HTTP at " in ready
        asked = urllib.request.Request(
            f"http://{ready.split()[-1]}/v1/completions", b'{"prompt": "a", "max_tokens": 3}'
        )
        asked.add_header("Content-Type", "application/json")
        answer = await asyncio.to_thread(lambda: urllib.request.urlopen(asked, timeout=60).read())
        assert json.loads(answer)["usage"]["completion_tokens"] == 3
        async with AsyncClient(address_in(ready)) as client:
            finished = await ask(client, Question.draw(Random(2), 40, 16))
        assert finished.decode_worker == "both-0"
        ray_command(nodes, "down")
