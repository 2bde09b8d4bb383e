"""What a decode worker that is busy costs those whose KV is handed off to it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence

from pdserve.engine.port import Row
from pdserve.messages import Role
from pdserve.request import GenerateRequest, Tokens
from pdserve.sampling import SamplingParams
from pdserve.service.config import Config
from tests.simulation.cluster import Delays, SimCluster
from tests.support.virtual_clock import VirtualClock
from tests.support.virtual_loop import run_virtual

STEP_S = 0.04  # of the decode worker
PREFILL_TOKEN_S = (
    0.001  # a prompt begins with a step of the decode worker: their lengths make hand-offs meet any moment
)
NUM_STREAMS, STREAM_TOKENS = 8, 200
NUM_VISITS, VISIT_TOKENS = 60, 4
BETWEEN_S = 0.09
TRANSFER_S = 0.01  # three blocks, and the frames around them


def step_s(rows: Sequence[Row]) -> float:
    """A prefill worker's rows have many tokens, a decode worker's one each."""
    num_tokens = sum(len(row.token_ids) for row in rows)
    return STEP_S if num_tokens == len(rows) else num_tokens * PREFILL_TOKEN_S


def test_a_hand_off_to_a_busy_worker_waits_for_one_step_only() -> None:
    """Token 1 comes with the first step that begins when the KV is there: no message about blocks waits before."""
    clock = VirtualClock()
    gaps_s = run_virtual(_play(clock), clock, limit_s=60.0)
    print(f"first gaps {min(gaps_s):.4f} … {max(gaps_s):.4f} s")
    assert max(gaps_s) <= 2 * STEP_S + TRANSFER_S
    assert max(gaps_s) - min(gaps_s) >= 0.75 * STEP_S, "they meet the steps at any moment"


async def _play(clock: VirtualClock) -> list[float]:
    delays = Delays(session_s=0.0005, link_s=0.0005, owner_s=0.0002)
    async with SimCluster(Config(), clock, "busy decode", delays=delays, step_s=step_s) as cluster:
        cluster.add_worker("p0", Role.PREFILL, num_blocks=1024)
        cluster.add_worker("d0", Role.DECODE, num_blocks=1024)
        await asyncio.sleep(2.0)
        async with asyncio.TaskGroup() as group:
            for index in range(NUM_STREAMS):
                group.create_task(_gaps_s(cluster, index, STREAM_TOKENS))
            await asyncio.sleep(1.0)
            visits: list[asyncio.Task[list[float]]] = []
            for index in range(NUM_VISITS):
                await asyncio.sleep(BETWEEN_S)
                visits.append(group.create_task(_gaps_s(cluster, NUM_STREAMS + index, VISIT_TOKENS)))
        return [task.result()[0] for task in visits]


async def _gaps_s(cluster: SimCluster, index: int, num_tokens: int) -> list[float]:
    """Between the tokens of one request."""
    app = cluster.routers["r0"].app
    assert app is not None, "the router runs"
    prompt = tuple(32 + (index * 31 + place * (7 + index % 13)) % 90 for place in range(20 + index % 40))
    sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    came_s: list[float] = []
    async for event in app.generate(GenerateRequest(input=prompt, sampling=sampling)):
        if isinstance(event, Tokens):
            came_s += [cluster.clock.now_s()] * len(event.token_ids)
    return [later - earlier for earlier, later in itertools.pairwise(came_s)]
