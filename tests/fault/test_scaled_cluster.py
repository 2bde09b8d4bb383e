"""`pdserve up` with ranges: four times the load brings workers, its end takes them away, and no answer is harmed.

The fake engine is as slow as a model, so that real processes have a real load. What is waited for is what scaling and
the router count and say; how long it took is printed, and bounded where time is virtual (tests/property/scaling).
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from pdserve.client import AsyncClient
from pdserve.clock import SystemClock
from pdserve.figures import NOTHING_COUNTED, Spread
from tests.support.load import SteadyLoad
from tests.support.processes import LocalCluster
from tests.support.waiting import until

LIMIT_S = 100.0
TTFT_S, GAP_S = 1.0, 0.1
# A prefill worker computes about 450 prompt tokens a second; about four sequences fit a decode worker's blocks.
PACE = ("--engine.fake-step-s", "0.02", "--engine.fake-token-s", "0.002", "--engine.num-blocks", "64")
SCALED = (
    "--prefill", "1..3", "--decode", "1..3", "--ttft-target", f"{TTFT_S}", "--itl-target", f"{GAP_S}",
    "--scaling.cool-down-up-s", "2", "--scaling.cool-down-down-s", "4",
    "--scaling.interval-s", "0.5", "--scaling.grow-after-s", "1",
)  # fmt: skip
ENOUGH = 10  # requests of which nine must keep the targets


class Watch:
    """What the router of a cluster says."""

    def __init__(self, client: AsyncClient) -> None:
        self.client = client
        self._then = NOTHING_COUNTED

    async def has_more(self) -> bool:
        """Whether there are more workers than at first, and they take work."""
        workers = (await self.client.status()).workers
        return sum(worker.state == "up" for worker in workers) > 2

    async def is_as_before(self) -> bool:
        return [worker.state for worker in (await self.client.status()).workers] == ["up", "up"]

    async def keeps_its_targets(self) -> bool:
        """Whether nine of ten requests, and gaps, of those since this was asked last have."""
        now = (await self.client.status()).figures
        ttft, gap = now.ttft.since(self._then.ttft), now.gap.since(self._then.gap)
        if sum(ttft.counts) < ENOUGH:
            return False
        self._then = now
        return _nine_of_ten_within(ttft, TTFT_S) and _nine_of_ten_within(gap, GAP_S)


def _nine_of_ten_within(spread: Spread, limit_s: float) -> bool:
    worst_s = spread.percentile(90)
    return worst_s is not None and worst_s <= limit_s


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_load_times_four_and_back(tmp_path: Path) -> None:
    clock, drawn = SystemClock(), random.Random(1)
    with LocalCluster(tmp_path, "--engine", "fake", *PACE, *SCALED) as cluster:
        targets = (cluster.target,)
        async with AsyncClient(cluster.target) as client:
            watch = Watch(client)
            async with SteadyLoad(lambda: targets, drawn, num_clients=2, max_tokens=40) as load:
                await load.answers(count=ENOUGH)
                begun_s = clock.now_s()
                async with SteadyLoad(lambda: targets, drawn, num_clients=6, max_tokens=40) as more:
                    await until("more workers", watch.has_more, limit_s=LIMIT_S, told=cluster.log_tail)
                    await until(
                        "targets met", watch.keeps_its_targets, limit_s=LIMIT_S, told=cluster.log_tail
                    )
                    print(f"targets met again after {clock.now_s() - begun_s:.1f} s")
                    await more.answers(count=ENOUGH)
                await until("as before", watch.is_as_before, limit_s=LIMIT_S, told=cluster.log_tail)
                await load.answers(count=ENOUGH)
            status = await client.status()
        assert (status.figures.num_requests_failed, status.figures.num_requests_refused) == (0, 0)
        assert status.scaling is not None
        assert (status.scaling.num_prefill, status.scaling.num_decode) == (1, 1)
        assert "→ 1: one is spare" in status.scaling.last_change
        assert cluster.stop() == 0
    said = [line for line in cluster.log_tail(100_000).splitlines() if "scaling: " in line]
    assert len(said) >= 2
    print("\n".join(said))
