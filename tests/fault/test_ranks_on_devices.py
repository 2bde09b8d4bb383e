"""Workers whose ranks have a device each, by real processes: torch's CPU device in the GPUs' place, gloo in NCCL's.

Blocks go from a worker of two ranks to one of four, through memory that all their devices copy to and from.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from pdserve.client import AsyncClient
from pdserve.service.lifecycle import EXIT_UNSOUND
from tests.fault.test_ranks import NUM_TOKENS, PARAMS, PROMPTS, answer, ask, folder, rank_pids
from tests.support.pids import wait_gone
from tests.support.singles import Singles
from tests.unit.engine_torch.driving import make_runner

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
__all__ = ["folder"]  # the fixture


async def test_they_serve_as_one_and_end_as_one(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PDSERVE_DEVICE", "double")
    common = (
        "--model", str(folder), "--engine.dtype", "float32", "--engine.num-blocks", "64",
        "--engine.max-batch", "4", "--transport.kinds", "stream",
    )  # fmt: skip
    whole = make_runner(folder, num_blocks=64)
    wanted = [answer(whole, prompt, params, seed=5) for prompt, params in zip(PROMPTS, PARAMS, strict=True)]
    with Singles(tmp_path) as cluster:
        router = cluster.router("r0", "--model", str(folder))
        cluster.worker("prefill", "p0", *common, "--tensor-parallel", "2")
        d0 = cluster.worker("decode", "d0", *common, "--tensor-parallel", "4")
        cluster.start()
        await asyncio.gather(*(single.ready() for single in cluster.all.values()))
        assert await d0.metric("pdserve_worker_ranks") == 4
        assert await d0.metric("pdserve_kv_staging_bytes") == 0
        async with AsyncClient(router.address) as client:
            got = await asyncio.gather(
                *(ask(client, prompt, params, seed=5) for prompt, params in zip(PROMPTS, PARAMS, strict=True))
            )
            assert got == wanted and all(len(each) == NUM_TOKENS for each in got)
            assert await d0.metric("pdserve_kv_transfer_bytes_total", direction="received") > 0

            begun = asyncio.Event()
            streaming = asyncio.create_task(ask(client, PROMPTS[0], PARAMS[0], 5, begun.set))
            await begun.wait()
            others = rank_pids(d0)
            os.kill(others[2], signal.SIGKILL)
            assert await asyncio.to_thread(d0.wait) == EXIT_UNSOUND, d0.log_tail()
            for pid in others:
                await wait_gone(pid)
            d1 = cluster.worker("decode", "d1", *common).start()  # of one rank
            assert await streaming == wanted[0]
            await d1.ready()
