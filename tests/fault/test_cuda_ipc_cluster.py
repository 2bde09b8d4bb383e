"""A cluster over CUDA IPC's double: every text is right while prefill workers die under their readers."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from pdserve.client import AsyncClient
from tests.support.asking import Question, ask, at_rest
from tests.support.singles import Single, Singles
from tests.support.waiting import until

HEARTBEAT_S = 0.1
FLAGS = ("--timeouts.heartbeat-s", f"{HEARTBEAT_S}", "--engine", "fake", "--transport.kinds", "cuda_ipc,stream",
         "--transport.strict", "true", "--engine.num-blocks", "2048")  # fmt: skip


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[dict[str, Single]]:
    """Two prefill workers and a decode worker, and their router."""
    with Singles(tmp_path) as singles:
        made = {"r0": singles.router("r0", "--timeouts.heartbeat-s", f"{HEARTBEAT_S}")}
        for role, name in (("prefill", "p0"), ("prefill", "p1"), ("decode", "d0")):
            made[name] = singles.worker(role, name, *FLAGS)
            made[name].environ = {"PDSERVE_CUDA_IPC": "double"}
        singles.start()
        yield made


async def test_prefill_workers_die_and_every_text_is_right(workers: dict[str, Single]) -> None:
    random = Random(5)
    router, decode, victim = workers.pop("r0"), workers["d0"], workers["p0"]
    async with AsyncClient(router.address) as client:
        await at_rest(client, workers, heartbeat_s=HEARTBEAT_S)
        pid = decode.pid
        assert await decode.metric("pdserve_cuda_ipc_mapped_pools") == 2
        for _ in range(3):
            asked = [asyncio.create_task(ask(client, Question.draw(random, 2_000, 20))) for _ in range(12)]
            before = await decode.metric("pdserve_kv_transfer_bytes_total")

            async def moves(before: float = before) -> bool:
                return await decode.metric("pdserve_kv_transfer_bytes_total") > before

            await until("blocks move", moves)
            victim.kill()
            finished = await asyncio.gather(*asked)
            assert {each.transport for each in finished} <= {"cuda_ipc", ""}
            victim.start()
            await at_rest(client, workers, heartbeat_s=HEARTBEAT_S)
        assert decode.pid == pid
        assert await decode.metric("pdserve_cuda_ipc_pending_reads") == 0
        assert decode.terminate() == 0


def test_a_worker_without_a_device_says_what_is_wrong(tmp_path: Path) -> None:
    with Singles(tmp_path) as singles:
        singles.router("r0")
        worker = singles.worker("decode", "d0", *FLAGS).start()
        assert worker.wait() == 2
        assert "has cuda_ipc, but the KV pool isn't on a CUDA device" in worker.log_tail()
        worker.send(signal.SIGKILL)
