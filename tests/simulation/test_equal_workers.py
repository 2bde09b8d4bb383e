"""Equal workers get equal shares, however many clients ask at a time, and so does one that has just joined.

Engines are far faster than what a router guesses before anything was measured, and their steps vary.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest

from pdserve.engine.port import Row
from pdserve.messages import Role
from pdserve.request import Finished, GenerateRequest
from pdserve.sampling import SamplingParams
from pdserve.service.config import Config
from tests.simulation.cluster import Delays, SimCluster
from tests.support.virtual_clock import VirtualClock
from tests.support.virtual_loop import run_virtual

NUM_REQUESTS = 120
NUM_LOCAL = (
    480  # which of such workers is free decides more than whose turn it is: their shares even out later
)
NUM_TOKENS = 4
MOST = 1.2  # × the least
SHARE_S = 2.0  # a worker that joins has its share within so long
AT_ONCE = (1, 2, 5, 16, 64)


@dataclass(frozen=True, slots=True)
class Served:
    """begun_s: when its client asked."""

    begun_s: float
    prefill: str
    decode: str


class Steps:
    """What a step takes: 1 ms, and 30 µs a position, give or take a fifth."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(f"steps/{seed}")

    def __call__(self, rows: Sequence[Row]) -> float:
        return (0.001 + 3e-5 * sum(len(row.token_ids) for row in rows)) * self._random.uniform(0.8, 1.2)


async def ask_all(
    cluster: SimCluster, at_once: int, num_prompt: int, source: random.Random, numbers: Iterator[int]
) -> list[Served]:
    """As many clients as are to ask at a time; each asks for its next text when it has one."""
    app = cluster.routers["r0"].app
    assert app is not None, "the router runs"
    served: list[Served] = []

    async def client() -> None:
        for _ in numbers:
            prompt = tuple(source.choices(range(32, 127), k=num_prompt))
            begun_s = cluster.clock.now_s()
            sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
            async for event in app.generate(GenerateRequest(input=prompt, sampling=sampling)):
                if isinstance(event, Finished):
                    served.append(Served(begun_s, event.prefill_worker, event.decode_worker))

    async with asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(client())
    return served


def make_cluster(seed: int, clock: VirtualClock) -> SimCluster:
    delays = Delays(session_s=0.0005, link_s=0.0005, owner_s=0.0002)
    return SimCluster(
        Config(),
        clock,
        f"equal/{seed}",
        delays=delays,
        step_s=Steps(seed),
        num_blocks=1024,
        window_tokens=1024,
    )


def spread(names: Counter[str]) -> float:
    return max(names.values()) / min(names.values())


@pytest.mark.parametrize("num_prompt", [12, 600])
@pytest.mark.parametrize("at_once", AT_ONCE)
def test_equal_workers_serve_alike_however_many_ask(at_once: int, num_prompt: int) -> None:
    seed, clock = at_once, VirtualClock()

    async def play() -> list[Served]:
        async with make_cluster(seed, clock) as cluster:
            for index in range(2):
                cluster.add_worker(f"p{index}", Role.PREFILL)
                cluster.add_worker(f"d{index}", Role.DECODE)
            await asyncio.sleep(2.0)
            return await ask_all(cluster, at_once, num_prompt, random.Random(seed), iter(range(NUM_REQUESTS)))

    served = run_virtual(play(), clock, limit_s=600.0)
    for names in (Counter(each.prefill for each in served), Counter(each.decode for each in served)):
        print(names)
        assert len(names) == 2 and spread(names) <= MOST, names


@pytest.mark.parametrize("num_prompt", [12, 600])
@pytest.mark.parametrize("at_once", AT_ONCE)
def test_workers_that_do_both_serve_alike_however_many_ask(at_once: int, num_prompt: int) -> None:
    clock = VirtualClock()

    async def play() -> list[Served]:
        async with make_cluster(3, clock) as cluster:
            for index in range(3):
                cluster.add_worker(f"b{index}", Role.BOTH)
            await asyncio.sleep(2.0)
            return await ask_all(cluster, at_once, num_prompt, random.Random(3), iter(range(NUM_LOCAL)))

    served = run_virtual(play(), clock, limit_s=600.0)
    names = Counter(each.decode for each in served)
    assert len(names) == 3 and spread(names) <= MOST, names


@pytest.mark.parametrize("role", list(Role))
@pytest.mark.slow
@pytest.mark.parametrize("at_once", [1, 4])
def test_who_joins_under_load_has_its_share_and_no_more_within_two_seconds(at_once: int, role: Role) -> None:
    clock = VirtualClock()
    joined_s = 0.0

    async def join(cluster: SimCluster) -> None:
        nonlocal joined_s
        await asyncio.sleep(3.0)
        joined_s = clock.now_s()
        cluster.add_worker("new", role)

    async def play() -> list[Served]:
        async with make_cluster(4, clock) as cluster:
            if role is Role.BOTH:
                for index in range(3):
                    cluster.add_worker(f"b{index}", Role.BOTH)
            else:
                for index in range(3):
                    cluster.add_worker(f"p{index}", Role.PREFILL)
                    cluster.add_worker(f"d{index}", Role.DECODE)
            await asyncio.sleep(2.0)
            joining = asyncio.create_task(join(cluster))
            numbers = itertools.takewhile(
                lambda _: not joined_s or clock.now_s() < joined_s + 2 * SHARE_S, itertools.count()
            )
            served = await ask_all(cluster, at_once, 300, random.Random(4), numbers)
            await joining
            return served

    served = run_virtual(play(), clock, limit_s=600.0)
    for since_s, until_s, least in ((0.0, SHARE_S, 0.5), (SHARE_S, 2 * SHARE_S, 1 / MOST)):
        names = Counter(
            each.prefill if role is Role.PREFILL else each.decode
            for each in served
            if since_s <= each.begun_s - joined_s < until_s
        )
        others = [count for name, count in names.items() if name != "new"]
        print(f"{since_s:g} … {until_s:g} s: {names}")
        assert least * min(others) <= names["new"] <= MOST * max(others), names
