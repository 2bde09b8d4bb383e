"""A hundred requests share a slow link: each waits for its KV far longer than any time-out, and none is tried again."""

from __future__ import annotations

import asyncio

from pdserve.messages import Role
from pdserve.request import Finished, GenerateRequest
from pdserve.sampling import SamplingParams
from pdserve.service.config import Config
from tests.simulation.cluster import SimCluster
from tests.support.virtual_clock import VirtualClock
from tests.support.virtual_loop import run_virtual

NUM_REQUESTS, BLOCKS_EACH, BLOCK_SIZE = 100, 3, 128
BLOCK_BYTES = 32 * BLOCK_SIZE  # of the fake model
LINK_S = 100.0  # for all of their KV


def test_leases_on_a_slow_link_wait_for_their_turn() -> None:
    clock = VirtualClock()
    waits_s = run_virtual(_play(clock), clock, limit_s=1000.0)
    print(f"from asking to the end: {min(waits_s):.1f} … {max(waits_s):.1f} s")
    assert max(waits_s) > 0.8 * LINK_S, "the link was slow"


async def _play(clock: VirtualClock) -> list[float]:
    num_blocks = NUM_REQUESTS * BLOCKS_EACH
    async with SimCluster(Config(), clock, "slow link", block_size=BLOCK_SIZE) as cluster:
        cluster.add_worker("p0", Role.PREFILL, num_blocks=5 * num_blocks)
        cluster.add_worker("d0", Role.DECODE, num_blocks=1024)
        await asyncio.sleep(2.0)
        cluster.network.bytes_per_s = num_blocks * BLOCK_BYTES / LINK_S
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_ask(cluster, index)) for index in range(NUM_REQUESTS)]
        return [task.result() for task in tasks]


async def _ask(cluster: SimCluster, index: int) -> float:
    """Seconds until the end of one request, which its first attempt must reach."""
    app = cluster.routers["r0"].app
    assert app is not None, "the router runs"
    asked_s = cluster.clock.now_s()
    places = range(BLOCKS_EACH * BLOCK_SIZE)
    prompt = tuple(32 + (index * 31 + place * (7 + index % 13)) % 90 for place in places)
    sampling = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    async for event in app.generate(GenerateRequest(input=prompt, sampling=sampling)):
        if isinstance(event, Finished):
            assert event.num_attempts == 1
    return cluster.clock.now_s() - asked_s
