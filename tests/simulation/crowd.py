"""Many requests on a sound cluster: how long each waits, and who serves it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.messages import Role
from pdserve.request import Finished, GenerateRequest, Tokens
from pdserve.sampling import SamplingParams
from pdserve.service.config import Config
from tests.simulation.cluster import Delays, SimCluster
from tests.support.virtual_clock import VirtualClock
from tests.support.virtual_loop import run_virtual

JOIN_S = 2.0
LIMIT_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Crowd:
    """routers, prefills, decodes: how many; num_blocks: of each decode worker (prefill workers have plenty)."""

    seed: int
    routers: int
    prefills: int
    decodes: int
    num_blocks: int = 1024
    config: Config


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """One request: when it comes, and how large it is."""

    at_s: float
    num_prompt: int
    max_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """One request as its client saw it. waited_s: until its first token; took_s: until its end."""

    router: str
    waited_s: float
    took_s: float
    prefill: str
    decode: str


def serve(crowd: Crowd, visits: Sequence[Visit]) -> list[Served]:
    """Serve them all, over the routers in turn; in the order of `visits`. No two prompts share a prefix."""
    clock = VirtualClock()
    return run_virtual(_serve(crowd, visits, clock), clock, limit_s=LIMIT_S)


async def _serve(crowd: Crowd, visits: Sequence[Visit], clock: VirtualClock) -> list[Served]:
    router_ids = tuple(f"r{index}" for index in range(crowd.routers))
    delays = Delays(session_s=0.001, link_s=0.001, owner_s=0.01)
    cluster = SimCluster(
        crowd.config, clock, f"crowd/{crowd.seed}", router_ids=router_ids, delays=delays, skewed=True
    )
    async with cluster:
        for index in range(crowd.prefills):
            cluster.add_worker(f"p{index}", Role.PREFILL, num_blocks=1024)
        for index in range(crowd.decodes):
            cluster.add_worker(f"d{index}", Role.DECODE, num_blocks=crowd.num_blocks)
        await asyncio.sleep(JOIN_S)
        source = cluster.random_for("prompts")
        begun_s = clock.now_s()
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(
                    _visit(
                        cluster,
                        clock,
                        router_ids[index % crowd.routers],
                        visit,
                        begun_s,
                        _prompt(source, visit),
                    )
                )
                for index, visit in enumerate(visits)
            ]
        return [task.result() for task in tasks]


def _prompt(source: random.Random, visit: Visit) -> tuple[int, ...]:
    return tuple(source.choices(range(32, 127), k=visit.num_prompt))


async def _visit(
    cluster: SimCluster,
    clock: VirtualClock,
    router_id: str,
    visit: Visit,
    begun_s: float,
    prompt: tuple[int, ...],
) -> Served:
    await asyncio.sleep(begun_s + visit.at_s - clock.now_s())
    app = cluster.routers[router_id].app
    assert app is not None, "every router runs"
    asked_s, first_s = clock.now_s(), None
    prefill = decode = ""
    sampling = SamplingParams(max_tokens=visit.max_tokens)
    async for event in app.generate(GenerateRequest(input=prompt, sampling=sampling)):
        if isinstance(event, Tokens) and first_s is None:
            first_s = clock.now_s()
        elif isinstance(event, Finished):
            prefill, decode = event.prefill_worker, event.decode_worker
    assert first_s is not None, "a request has a token"
    return Served(
        router=router_id,
        waited_s=first_s - asked_s,
        took_s=clock.now_s() - asked_s,
        prefill=prefill,
        decode=decode,
    )
