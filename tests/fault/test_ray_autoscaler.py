"""On a Ray that begins without a machine for decode workers: its autoscaler is asked for them, and they go again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from random import Random

import pytest

from deploy.ray.client import joined
from pdserve.client import AsyncClient
from tests.support.asking import Question, ask
from tests.support.processes import run_cli
from tests.support.ray_autoscaler import Machines
from tests.support.ray_cluster import RayNodes, ray_nodes
from tests.support.waiting import until

LIMIT_S = 100.0
FLAGS = ("--engine", "fake", "--transport.kinds", "stream", "--router-resources", "router=1",
         "--prefill-resources", "prefill=1", "--decode-resources", "CPU=1,decode=1")  # fmt: skip

pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]


async def ray_command(nodes: RayNodes, action: str, *args: str) -> str:
    """Standard output of `pdserve ray ACTION`, which must succeed."""
    command = ("ray", action, "--address", nodes.address, "--name", "grown", *args)
    done = await asyncio.to_thread(run_cli, *command, limit_s=150)
    assert done.returncode == 0, done.stderr
    return done.stdout


async def test_machines_come_and_go_with_the_workers() -> None:
    machines = Machines({"CPU": 1, "decode": 1, "object_store_memory": 80 << 20}, most=3)
    async with ray_nodes(machines=machines, CPU=0, router=1, prefill=1) as nodes:
        with joined(nodes.address):
            import ray

            async def are(count: int) -> bool:
                there = [each for each in ray.nodes() if each["Alive"] and each["Resources"].get("decode")]
                return len(there) == count

            def machines_are(count: int) -> Awaitable[object]:
                return until(
                    f"{count} machines", lambda: are(count), limit_s=LIMIT_S, told=lambda: str(ray.nodes())
                )

            assert await are(0)
            ready = await ray_command(nodes, "up", *FLAGS)
            await machines_are(1)
            async with AsyncClient(ready.split(" is ready at ")[1].rpartition(": ")[0]) as client:
                await ask(client, Question.draw(Random(1), 40, 16))
                await ray_command(nodes, "scale", "--decode", "3")
                await machines_are(3)
                await ray_command(nodes, "scale", "--decode", "1")
                await machines_are(1)  # what is asked for stays, idle or not
                await ask(client, Question.draw(Random(2), 40, 16))
            await ray_command(nodes, "down")
            await machines_are(0)  # nothing is asked for any more
