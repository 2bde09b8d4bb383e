"""Row 14: the sessions of a decode worker are reset while hundreds of sequences stream on it."""

from __future__ import annotations

import asyncio

from pdserve.engine import fake_rule
from pdserve.messages import Role
from pdserve.request import Finished, GenerateRequest, Tokens
from pdserve.sampling import SamplingParams
from pdserve.service.config import Config, EngineConfig
from tests.simulation.cluster import Delays, SimCluster, SimWorker
from tests.simulation.invariants import unrest
from tests.simulation.observer import Unobserved
from tests.simulation.phases import attempts_of
from tests.support.virtual_clock import VirtualClock
from tests.support.virtual_loop import run_virtual

NUM_REQUESTS = 400
NUM_STREAMS = 150  # on the one worker, at least
NUM_PROMPT = 24
NUM_TOKENS = 60
SLOW = 40.0
QUIET_S = 12.0
LIMIT_S = 300.0


class _ReplayWatch(Unobserved):
    """The most replays that ever ran at once, and the bound that they had then."""

    def __init__(self) -> None:
        self.most = 0
        self.cluster: SimCluster | None = None

    def on_turn(self, worker: SimWorker) -> None:
        app = None if self.cluster is None else self.cluster.routers["r0"].app
        if app is not None:
            self.most = max(self.most, app.admission.num_replaying)
            assert app.admission.num_replaying <= app.admission.max_replays, "a storm of replays"


def test_a_reset_with_hundreds_of_streams_makes_no_storm_and_no_wrong_text() -> None:
    clock = VirtualClock()
    num_hit, watch = run_virtual(_play(clock), clock, limit_s=LIMIT_S)
    assert num_hit >= NUM_STREAMS
    assert watch.most >= 2, "replays there were"


async def _play(clock: VirtualClock) -> tuple[int, _ReplayWatch]:
    watch = _ReplayWatch()
    config = Config(engine=EngineConfig(max_batch=400, max_step_tokens=512))
    delays = Delays(session_s=0.001, link_s=0.001, owner_s=0.002)
    cluster = watch.cluster = SimCluster(
        config, clock, "storm", num_blocks=4096, delays=delays, observer=watch
    )
    async with cluster:
        for worker_id in ("p0", "p1"):
            cluster.add_worker(worker_id, Role.PREFILL)
        for worker_id in ("d0", "d1"):
            cluster.add_worker(worker_id, Role.DECODE).engine_slowness = SLOW  # so that many stream at once
        await asyncio.sleep(1.0)
        async with asyncio.TaskGroup() as group:
            for index in range(NUM_REQUESTS):
                group.create_task(_ask(cluster, index))
            num_hit = await _until_many_stream(cluster.workers["d0"])
            cluster.fabric.reset(worker_id="d0")
        until_s = clock.now_s() + QUIET_S
        while next(unrest(cluster), None) is not None and clock.now_s() < until_s:
            await asyncio.sleep(0.2)
        assert not list(unrest(cluster))
    return num_hit, watch


async def _until_many_stream(worker: SimWorker) -> int:
    while (count := sum(attempt.seq.num_generated > 1 for attempt in attempts_of(worker))) < NUM_STREAMS:
        await asyncio.sleep(0.001)
    return count


async def _ask(cluster: SimCluster, index: int) -> None:
    app = cluster.routers["r0"].app
    assert app is not None, "the router runs"
    prompt = tuple(32 + (index * 31 + place * (7 + index % 13)) % 90 for place in range(NUM_PROMPT))
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)
    ids: list[int] = []
    num_ends = 0
    async for event in app.generate(GenerateRequest(input=prompt, sampling=sampling)):
        if isinstance(event, Tokens):
            assert event.first_index == len(ids), "each index once, in order"
            ids += event.token_ids
        elif isinstance(event, Finished):
            num_ends += 1
    assert num_ends == 1
    assert ids == fake_rule.expected_tokens(prompt, NUM_TOKENS, greedy=True)
