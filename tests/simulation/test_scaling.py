"""Scaling over a simulated cluster: real routers, workers and loop in virtual time, while workers and a router die.

Four times the load comes and goes. Every answer is whole and right, the numbers stay in their bounds, nobody who is the
last of a role is taken away, and what the load brought has gone at the end.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Iterator, Mapping, Sequence

import pytest
import structlog

from deploy.scaling.decide import Decision
from deploy.scaling.loop import ScalingLoop
from deploy.scaling.targets import SCALED, Counts, Range, ScalingTargets
from pdserve.engine import fake_rule
from pdserve.engine.port import Row
from pdserve.messages import Role
from pdserve.request import Finished, GenerateRequest, Tokens
from pdserve.sampling import SamplingParams
from pdserve.service.config import Config, EngineConfig
from pdserve.service.scaling_config import ScalingConfig
from pdserve.status import ClusterStatus
from router.app import RouterApp
from tests.simulation.cluster import SimCluster
from tests.simulation.invariants import unrest
from tests.support.fluid_cluster import reversals
from tests.support.virtual_clock import VirtualClock
from tests.support.virtual_loop import run_virtual

CALM_S, BUSY_S, LATER_S = 8.0, 25.0, 60.0  # each from the end of the one before
CALM, BUSY = 2, 8  # clients that ask one question after another
LIMIT_S = 600.0
TARGETS = ScalingTargets(
    prefill=Range(1, 3),
    decode=Range(1, 3),
    how=ScalingConfig(
        ttft_target_s=0.4,
        itl_target_s=0.12,
        cool_down_up_s=2.0,
        cool_down_down_s=8.0,
        guard_s=20.0,  # a worker that dies makes a number too small that isn't; within LATER_S that is over
    ),
)


def step_s(rows: Sequence[Row]) -> float:
    return 0.04 + 0.003 * sum(len(row.token_ids) for row in rows)


class Stage:
    """Routers, actuator and audience of a loop that scales the cluster. Clients use r0; r1 comes and goes."""

    def __init__(self, cluster: SimCluster, seed: int) -> None:
        self.cluster = cluster
        self.random = random.Random(f"scaling/{seed}")
        self.roles: dict[str, Role] = {}
        self.num_made = 0
        self.trace: list[Counts] = []
        self.stop = asyncio.Event()
        for role in SCALED:
            self._add(role, 0.0)

    @property
    def app(self) -> RouterApp:
        app = self.cluster.routers["r0"].app
        assert app is not None
        return app

    def _add(self, role: Role, delay_s: float) -> None:
        self.num_made += 1
        name = f"{role.value}-{self.num_made}"
        self.roles[name] = role
        self.cluster.add_worker(name, role, delay_s=delay_s)

    # --- Routers, Audience

    async def ask(self) -> Sequence[ClusterStatus | None]:
        apps = [router.app for router in self.cluster.routers.values()]
        return [None if app is None else app.status() for app in apps]

    async def tell(self, decision: Decision) -> None:
        assert decision.counts == self.counts
        for role in SCALED:
            assert TARGETS.range_of(role).least <= self.counts.of(role) <= TARGETS.range_of(role).most
        self.trace.append(self.counts)

    async def pause(self, delay_s: float) -> None:
        await asyncio.sleep(delay_s)

    # --- Actuator

    @property
    def counts(self) -> Counts:
        roles = list(self.roles.values())
        return Counts(prefill=roles.count(Role.PREFILL), decode=roles.count(Role.DECODE))

    async def scale(self, counts: Counts, victims: Mapping[Role, Sequence[str]]) -> None:
        for role in SCALED:
            ids = [name for name, its in self.roles.items() if its is role]
            for _ in range(counts.of(role) - len(ids)):
                self._add(role, 0.3 + 3.0 * self.random.random())
            going = [name for name in ids if name not in victims[role]] + list(victims[role])
            for name in going[: max(0, len(ids) - counts.of(role))]:
                self._check_not_last(name)
                del self.roles[name]
                self.cluster.workers[name].is_restarted = False
                self.cluster.workers[name].drain()

    async def set_role(self, worker_id: str, role: Role) -> None:
        self._check_not_last(worker_id)
        self.app.operators.set_role(worker_id, role)
        self.roles[worker_id] = self.cluster.workers[worker_id].role = role

    def _check_not_last(self, worker_id: str) -> None:
        member = self.app.fleet.get(worker_id)
        assert member is None or not member.usable or not self.app.fleet.topology.is_last_of_role(member)

    # --- clients and faults

    async def ask_on(self, index: int, stop: asyncio.Event) -> None:
        drawn = random.Random(f"client/{index}")
        while not stop.is_set():
            prompt = tuple(drawn.choices(range(32, 120), k=drawn.randrange(20, 90)))
            num_tokens = drawn.randrange(6, 16)
            sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens)
            ids: list[int] = []
            num_ends = 0
            async for event in self.app.generate(GenerateRequest(input=prompt, sampling=sampling)):
                if isinstance(event, Tokens):
                    assert event.first_index == len(ids), "each index once, in order"
                    ids += event.token_ids
                num_ends += isinstance(event, Finished)
            assert num_ends == 1
            assert ids == fake_rule.expected_tokens(prompt, num_tokens, greedy=True)

    async def break_things(self, span_s: float) -> None:
        """A worker is killed now and then, and started again; once, the second router too."""
        router_dies = self.random.randrange(3)
        for turn in range(3):
            await asyncio.sleep(span_s / 4 * (0.5 + self.random.random()))
            if turn == router_dies:
                self.cluster.routers["r1"].kill()
                await asyncio.sleep(4.0 * self.random.random())
                self.cluster.routers["r1"].start()
            name = self.random.choice(sorted(self.roles))
            worker = self.cluster.workers[name]
            worker.kill()
            await asyncio.sleep(0.5 + self.random.random())
            if name in self.roles:
                worker.start()


async def play(clock: VirtualClock, seed: int) -> Stage:
    config = Config(engine=EngineConfig(max_step_tokens=48, max_batch=16))
    cluster = SimCluster(
        config, clock, f"scaling/{seed}", router_ids=("r0", "r1"), num_blocks=48, step_s=step_s
    )
    async with cluster:
        stage = Stage(cluster, seed)
        await asyncio.sleep(1.0)  # the first workers join
        loop = ScalingLoop(stage, stage, stage, TARGETS, clock, stage.pause)
        async with asyncio.TaskGroup() as group:
            group.create_task(loop.run(stage.stop.is_set))
            faults = group.create_task(stage.break_things(CALM_S + BUSY_S + LATER_S / 2))
            busy_over = asyncio.Event()
            for index in range(CALM):
                group.create_task(stage.ask_on(index, stage.stop))
            await asyncio.sleep(CALM_S)
            for index in range(CALM, BUSY):
                group.create_task(stage.ask_on(index, busy_over))
            await asyncio.sleep(BUSY_S)
            busy_over.set()
            await faults
            await asyncio.sleep(LATER_S)
            stage.stop.set()
        await asyncio.sleep(5.0)
        for name in sorted(set(cluster.workers) - set(stage.roles)):
            gone = cluster.workers.pop(name)
            assert not gone.alive and gone.exit_codes[-1:] in ([0], []), "it drained, or was killed"
        assert not list(unrest(cluster))
    return stage


def check(seed: int) -> None:
    clock = VirtualClock()
    stage = run_virtual(play(clock, seed), clock, limit_s=LIMIT_S)
    totals = [counts.prefill + counts.decode for counts in stage.trace]
    assert max(totals) > 2, "the load brought workers"
    assert totals[-1] < max(totals), "which went again"
    for role in SCALED:
        counts = [each.of(role) for each in stage.trace]
        assert reversals(counts) <= 5, counts  # of the load, and of what died meanwhile


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Thousands of attempts: their log lines would take longer than they do."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    yield
    structlog.configure(**before)


@pytest.mark.parametrize("seed", range(2))
def test_four_times_the_load_and_back_while_things_die(seed: int) -> None:
    check(seed)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(2, 20))
def test_more_of_that(seed: int) -> None:
    check(seed)
