"""A worker whose steps take long is busy, not dead: those before say how long a step may take, the first among them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from pdserve.engine.port import Row
from pdserve.messages import Role
from pdserve.request import GenerateRequest
from pdserve.response import Finished
from pdserve.sampling import SamplingParams
from pdserve.service.config import Config
from tests.simulation.cluster import SimCluster
from tests.support.virtual_clock import VirtualClock
from tests.support.virtual_loop import run_virtual

TOKEN_S = 0.1
LONG, SHORT = 300, 3  # tokens; a step of the former takes 30 s
NUM_RECENT = 256  # steps that a worker remembers


def step_s(rows: Sequence[Row]) -> float:
    return TOKEN_S * sum(len(row.token_ids) for row in rows)


@pytest.mark.parametrize("role", [Role.PREFILL, Role.BOTH])
@pytest.mark.parametrize(
    "prompts", [[LONG] * 3, [LONG, *[SHORT] * (NUM_RECENT + 4), LONG]], ids=["long", "mixed"]
)
def test_a_long_step_is_no_hang(role: Role, prompts: list[int]) -> None:
    clock = VirtualClock()
    attempts = run_virtual(_play(clock, role, prompts), clock, limit_s=2_000.0)
    assert attempts == [1] * len(prompts)


async def _play(clock: VirtualClock, role: Role, prompts: list[int]) -> list[int]:
    attempts: list[int] = []
    async with SimCluster(Config(), clock, "slow steps", step_s=step_s) as cluster:
        cluster.add_worker("p0", role, num_blocks=1024)
        if role is Role.PREFILL:
            cluster.add_worker("d0", Role.DECODE, num_blocks=1024)
        await asyncio.sleep(2.0)
        app = cluster.routers["r0"].app
        assert app is not None, "the router runs"
        for index, length in enumerate(prompts):
            prompt = tuple(32 + (index * 31 + place * (7 + index % 13)) % 90 for place in range(length))
            sampling = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
            async for event in app.generate(GenerateRequest(input=prompt, sampling=sampling)):
                if isinstance(event, Finished):
                    attempts.append(event.num_attempts)
    return attempts
