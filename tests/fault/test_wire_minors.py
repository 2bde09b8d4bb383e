"""Processes of the previous wire minor among new ones, as during an upgrade: nothing refused, nothing lost."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from pdserve.client import AsyncClient
from pdserve.wire_version import WIRE_VERSION, text
from tests.support.asking import at_rest
from tests.support.load import SteadyLoad
from tests.support.singles import Single, Singles
from tests.support.waiting import until

NEW, OLD = text(WIRE_VERSION), text((WIRE_VERSION[0], WIRE_VERSION[1] - 1))
OLDER = ("--cluster.wire-minor", str(WIRE_VERSION[1] - 1))
FAKE = ("--engine", "fake", "--engine.num-blocks", "512")
WIRES = {"p-new": NEW, "p-old": OLD, "d-new": NEW, "d-old": OLD}


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_an_old_router_prefill_and_decode_worker_beside_new_ones(tmp_path: Path) -> None:
    with Singles(tmp_path) as singles:
        routers = singles.router("r-new"), singles.router("r-old", *OLDER)
        for role in ("prefill", "decode"):
            singles.worker(role, f"{role[0]}-new", *FAKE)
            singles.worker(role, f"{role[0]}-old", *FAKE, *OLDER)
        singles.start()
        for single in singles.all.values():
            await single.ready()
        for router in routers:
            await serve_through(router)
        for single in (*singles.workers, *routers):
            assert single.terminate() == 0, single.log_tail()


async def serve_through(router: Single) -> None:
    """All pairs are up, old with new; each decode worker answers, and nothing is refused or tried twice."""
    async with AsyncClient(router.address) as client:

        async def all_paired() -> bool:
            return sum(pair.up for pair in (await client.status()).pairs) == 4

        await until(f"{router.id} has all pairs", all_paired, told=router.log_tail)
        assert {worker.id: worker.wire for worker in (await client.status()).workers} == WIRES
        load = SteadyLoad(lambda: (router.address,), random.Random(3), num_clients=4, max_tokens=24)
        async with load:
            for worker in ("d-new", "d-old"):
                await load.answers(worker)
        await at_rest(client, WIRES)
        figures = (await client.status()).figures
    assert (figures.num_requests_failed, figures.num_requests_refused) == (0, 0)
    assert figures.num_requests_ended == load.served.total()
    assert await router.metric("pdserve_workers_refused_total") == 0
    for reason in ("WorkerLost", "Stale", "KvCorrupt", "StepFailed"):
        assert await router.metric("pdserve_attempts_total", reason=reason) == 0
