"""Whole workers over in-memory ports under virtual time, against a router that is played by the test."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable, Sequence

from pdserve.cli.roles import ROLES
from pdserve.engine import fake_rule
from pdserve.engine.fake_runner import FakeFaults, FakeRunner
from pdserve.errors import WorkerLost
from pdserve.ids import Epoch, WorkerRef
from pdserve.kv_memory import HostMemory, KvMemory
from pdserve.messages import (
    Abort,
    Credits,
    DecodeStarted,
    Down,
    DownHeartbeat,
    Drain,
    Failed,
    FirstToken,
    Granted,
    Heartbeat,
    Hello,
    Load,
    Pair,
    PairState,
    Role,
    SequenceFinished,
    SetRole,
    StartDecode,
    StartPrefill,
    Step,
    Superseded,
    Unsound,
    Up,
    Waiting,
    Welcome,
)
from pdserve.node.ports import LoadedModel, NetworkEnd, WorkerPorts, WorkerSetup
from pdserve.node.worker import Worker
from pdserve.owner import Waiter
from pdserve.sampling import SampleKey, SamplingParams
from pdserve.service.cache_events import SourceReader, Subscribe
from pdserve.service.config import Config, EngineConfig, WorkerConfig
from pdserve.service.lifecycle import EXIT_OK, EXIT_SUPERSEDED, EXIT_UNSOUND
from pdserve.service.metrics import WorkerMetrics
from pdserve.session import Session
from pdserve.worker.driver import OnDeath
from tests.simulation.loop_driver import DelayedInbox, LoopDriver, at_once
from tests.support.memories import StagedMemory
from tests.support.memory_network import MemoryNetwork
from tests.support.memory_session import MemoryWire
from tests.support.virtual_clock import VirtualClock
from tests.support.virtual_loop import run_virtual

KEY = SampleKey(params=SamplingParams(temperature=0.0), seed=0, choice=0, eos_token_ids=(256,), max_tokens=12)
IDS = tuple(range(1, 101))


class Router:
    """The router's end of all sessions: remembers what came, by worker id."""

    def __init__(self) -> None:
        self.hellos: dict[str, Hello] = {}
        self.ends: dict[str, Session[Down, Up]] = {}
        self.seen: dict[str, list[Up]] = {}
        self._news = asyncio.Event()

    async def serve(self, end: Session[Down, Up]) -> None:
        hello = await end.receive()
        assert isinstance(hello, Hello)
        name = hello.worker.id
        self.hellos[name], self.ends[name] = hello, end
        end.send(Welcome("r1"))
        while True:
            message = await end.receive()
            self.seen.setdefault(name, []).append(message)
            self._news.set()
            if isinstance(message, Heartbeat):
                end.send(DownHeartbeat())

    async def until(self, worker: str, kind: type[Up]) -> Up:
        """The first message of a kind from a worker."""
        while True:
            for message in self.seen.get(worker, []):
                if isinstance(message, kind):
                    return message
            self._news.clear()
            async with asyncio.timeout(60):
                await self._news.wait()

    def of(self, worker: str, kind: type[Up]) -> list[Up]:
        return [message for message in self.seen.get(worker, []) if isinstance(message, kind)]


class Cluster:
    """Workers on one virtual loop."""

    def __init__(self, clock: VirtualClock, tasks: asyncio.TaskGroup) -> None:
        self.loop = asyncio.get_running_loop()
        self.clock = clock
        self.tasks = tasks
        self.random = random.Random(5)
        self.network = MemoryNetwork(clock=clock, schedule=self.loop.call_later, delay=self.delay)
        self.router = Router()
        self.workers: dict[str, Worker] = {}
        self.running: dict[str, asyncio.Task[int]] = {}
        self.drivers: dict[tuple[str, str], LoopDriver] = {}

    def delay(self) -> float:
        return 0.0001 + 0.001 * self.random.random()

    def start(
        self, name: str, role: Role, *, faults: FakeFaults | None = None, num_blocks: int = 64
    ) -> Worker:
        runner = FakeRunner(num_blocks=num_blocks, faults=faults)
        model = LoadedModel(
            name="fake", runner=runner, tokenizer_fingerprint="t", tokenizer_files={}, eos_token_ids=(256,)
        )
        setup = WorkerSetup(
            me=WorkerRef(name, Epoch(self.clock.wall_ns(), 1)),
            config=Config(engine=EngineConfig(max_step_tokens=32), worker=WorkerConfig(routers=("r:1",))),
            model=model,
        )

        def network(memory: KvMemory, wake: Callable[[], None]) -> NetworkEnd:
            assert isinstance(memory, HostMemory)
            return NetworkEnd(self.network.join(name, memory=StagedMemory(memory), wake=wake))

        worker_name = name

        def drive(name: str, waiter: Waiter | None, on_death: OnDeath) -> LoopDriver:
            driver = LoopDriver(self.loop, self.delay, name, on_death)
            self.drivers[worker_name, name] = driver
            return driver

        ports = WorkerPorts(
            clock=self.clock,
            random_for=lambda owner: self.random,
            network=network,
            drive=drive,
            inbox=lambda deliver: DelayedInbox(self.loop, self.delay, deliver).post,
            dialer=self,
            resolver=self,
            roles=ROLES,
            background=at_once,
        )
        worker = Worker(setup, ports, WorkerMetrics(), role)
        self.workers[name] = worker
        self.running[name] = self.tasks.create_task(worker.run())
        return worker

    async def dial(self, address: str) -> Session[Up, Down]:
        wire = MemoryWire(self.loop.call_later, self.delay)
        self.tasks.create_task(self._serve(wire.router_end))
        return wire.worker_end

    async def _serve(self, end: Session[Down, Up]) -> None:
        with contextlib.suppress(WorkerLost):  # the session has ended
            await self.router.serve(end)

    async def send_cache_events(self, address: str, subscribe: Subscribe) -> None:
        reader = SourceReader(subscribe)
        try:
            while True:
                await reader.next()
        finally:
            reader.close()

    async def resolve(self, name: str) -> Sequence[str]:
        return [name]

    async def pair_up(self) -> None:
        """p0 and d0 join and get a link."""
        await self.router.until("p0", Load)
        await self.router.until("d0", Load)
        decode = self.router.hellos["d0"]
        self.router.ends["p0"].send(Pair(decode.worker, decode.kv_addresses))
        state = await self.router.until("p0", PairState)
        assert isinstance(state, PairState) and state.up

    def start_decode(self, handle: int, source: WorkerRef | None) -> StartDecode:
        return StartDecode(
            handle=handle,
            token_ids=IDS,
            num_prompt_tokens=100,
            key=KEY,
            deadline_left_s=60.0,
            num_strikes=0,
            source=source,
        )

    def tokens(self, worker: str) -> list[int]:
        started = self.router.of(worker, DecodeStarted)
        tokens = [message.first_token for message in started if isinstance(message, DecodeStarted)]
        for step in self.router.of(worker, Step):
            assert isinstance(step, Step)
            tokens += [token for part in step.sequences for token in part.token_ids]
        return tokens

    def assert_at_rest(self, worker: str) -> None:
        current = self.workers[worker].current
        assert current is not None
        counts = current.engine.pool.counts()
        assert (counts.granted, counts.owned, counts.quarantined) == (0, 0, 0)


def play(scenario: Callable[[Cluster], Awaitable[None]]) -> None:
    """Run a scenario; afterwards all workers that still run are stopped at once."""
    clock = VirtualClock()

    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            cluster = Cluster(clock, tasks)
            await scenario(cluster)
            for task in cluster.running.values():
                task.cancel()
            for end in cluster.router.ends.values():
                end.close("the test is over")

    run_virtual(main(), clock, limit_s=600)


async def one_request(cluster: Cluster, handle: int = 1) -> None:
    """A request through both workers, as a router conducts it."""
    router = cluster.router
    router.ends["d0"].send(cluster.start_decode(handle, router.hellos["p0"].worker))
    granted = await router.until("d0", Granted)
    assert isinstance(granted, Granted)
    router.ends["p0"].send(
        StartPrefill(
            handle=handle, token_ids=IDS, num_prompt_tokens=100, key=KEY, deadline_left_s=60.0, num_strikes=0,
            lease_id=granted.lease_id, decode_worker=router.hellos["d0"].worker,
            num_skip_blocks=granted.num_cached_blocks,
        )
    )  # fmt: skip


def test_a_prompt_goes_through_prefill_link_and_decode() -> None:
    async def scenario(cluster: Cluster) -> None:
        for name, role in (("p0", Role.PREFILL), ("d0", Role.DECODE)):
            cluster.start(name, role)
        await cluster.pair_up()
        assert isinstance(await cluster.router.until("p0", Credits), Credits)
        await one_request(cluster)
        await cluster.router.until("d0", SequenceFinished)
        assert cluster.tokens("d0") == fake_rule.expected_choice(IDS, KEY)
        first = await cluster.router.until("p0", FirstToken)
        assert isinstance(first, FirstToken) and first.token_id == cluster.tokens("d0")[0]
        await asyncio.sleep(1)
        for name in ("p0", "d0"):
            cluster.assert_at_rest(name)
            assert cluster.workers[name].not_ready == []
        beats = cluster.router.of("d0", Heartbeat)
        assert isinstance(beats[-1], Heartbeat) and beats[-1].num_steps == 11 and not beats[-1].has_work

    play(scenario)


def test_both_prefills_for_itself() -> None:
    async def scenario(cluster: Cluster) -> None:
        cluster.start("b0", Role.BOTH)
        await cluster.router.until("b0", Load)
        cluster.router.ends["b0"].send(cluster.start_decode(1, None))
        await cluster.router.until("b0", SequenceFinished)
        assert cluster.tokens("b0") == fake_rule.expected_choice(IDS, KEY)
        cluster.router.ends["b0"].send(Pair(cluster.router.hellos["b0"].worker, ("mem://x",)))
        state = await cluster.router.until("b0", PairState)
        assert isinstance(state, PairState) and not state.up and "both" in state.reason

    play(scenario)


def test_the_decode_workers_death_fails_the_prefill_and_keeps_its_cache() -> None:
    async def scenario(cluster: Cluster) -> None:
        for name, role in (("p0", Role.PREFILL), ("d0", Role.DECODE)):
            cluster.start(name, role)
        await cluster.pair_up()
        cluster.network.cut("d0", "p0")
        await one_request(cluster)
        await cluster.router.until("p0", FirstToken)
        failed = await cluster.router.until("p0", Failed)
        assert isinstance(failed, Failed) and failed.failure.error == "WorkerLost"
        states = cluster.router.of("p0", PairState)
        assert isinstance(states[-1], PairState) and not states[-1].up
        await asyncio.sleep(6)
        cluster.assert_at_rest("p0")
        current = cluster.workers["p0"].current
        assert current is not None and current.engine.pool.counts().cached == 6

    play(scenario)


def test_an_abort_to_both_leaves_nothing() -> None:
    async def scenario(cluster: Cluster) -> None:
        for name, role in (("p0", Role.PREFILL), ("d0", Role.DECODE)):
            cluster.start(name, role)
        await cluster.pair_up()
        await one_request(cluster)
        for name in ("p0", "d0"):
            cluster.router.ends[name].send(Abort(1))
        await asyncio.sleep(1)
        for name in ("p0", "d0"):
            cluster.assert_at_rest(name)

    play(scenario)


def test_drain_ends_with_zero_after_the_rest_is_served() -> None:
    async def scenario(cluster: Cluster) -> None:
        cluster.start("b0", Role.BOTH)
        await cluster.router.until("b0", Load)
        cluster.router.ends["b0"].send(cluster.start_decode(1, None))
        cluster.router.ends["b0"].send(Drain())
        assert await cluster.running["b0"] == EXIT_OK
        await cluster.router.until("b0", SequenceFinished)
        assert cluster.tokens("b0") == fake_rule.expected_choice(IDS, KEY)

    play(scenario)


def test_a_role_change_drains_joins_anew_and_serves() -> None:
    async def scenario(cluster: Cluster) -> None:
        cluster.start("d0", Role.DECODE)
        cluster.start("p0", Role.DECODE)
        await cluster.router.until("p0", Load)
        cluster.router.ends["p0"].send(cluster.start_decode(9, None))
        cluster.router.ends["p0"].send(SetRole(Role.PREFILL))
        await cluster.router.until("p0", SequenceFinished)
        while cluster.router.hellos["p0"].role is not Role.PREFILL:
            await asyncio.sleep(0.1)
        assert cluster.router.hellos["p0"].role_generation == 1
        await cluster.pair_up()
        await one_request(cluster)
        await cluster.router.until("d0", SequenceFinished)
        assert cluster.tokens("d0") == fake_rule.expected_choice(IDS, KEY)

    play(scenario)


def test_superseded_ends_the_process() -> None:
    async def scenario(cluster: Cluster) -> None:
        cluster.start("d0", Role.DECODE)
        await cluster.router.until("d0", Load)
        cluster.router.ends["d0"].send(Superseded())
        assert await cluster.running["d0"] == EXIT_SUPERSEDED

    play(scenario)


def test_an_unsound_engine_ends_the_process_after_telling_the_routers() -> None:
    async def scenario(cluster: Cluster) -> None:
        cluster.start("b0", Role.BOTH, faults=FakeFaults(failing_steps=frozenset({1}), sound=False))
        await cluster.router.until("b0", Load)
        cluster.router.ends["b0"].send(cluster.start_decode(1, None))
        assert await cluster.running["b0"] == EXIT_UNSOUND
        failed = await cluster.router.until("b0", Failed)
        assert isinstance(failed, Failed) and failed.failure.error == "StepFailed"
        seen = cluster.router.seen["b0"]
        (last_word,) = cluster.router.of("b0", Unsound)
        assert isinstance(last_word, Unsound) and last_word.failure.error == "StepFailed"
        assert seen.index(failed) < seen.index(last_word), "what broke it is told by name first"

    play(scenario)


def test_a_start_decode_is_answered_in_time_whatever_the_engine_does() -> None:
    async def scenario(cluster: Cluster) -> None:
        cluster.start("d0", Role.DECODE)
        await cluster.router.until("d0", Load)
        cluster.router.ends["d0"].send(cluster.start_decode(1, None))
        await cluster.router.until("d0", SequenceFinished)
        assert not cluster.router.of("d0", Waiting), "an engine that answers itself needs no help"
        cluster.drivers["d0", "engine"].pause()  # between two steps, and gets no CPU
        asked_s = cluster.loop.time()
        cluster.router.ends["d0"].send(cluster.start_decode(2, None))
        waiting = await cluster.router.until("d0", Waiting)
        assert isinstance(waiting, Waiting) and waiting.handle == 2
        assert cluster.loop.time() - asked_s < 0.3  # of grant_s = 1
        cluster.drivers["d0", "engine"].resume()
        await asyncio.sleep(1.0)
        assert (
            len(cluster.router.of("d0", SequenceFinished)) == 2 and len(cluster.router.of("d0", Waiting)) == 1
        )

    play(scenario)


def test_what_a_worker_measures_begins_when_its_loop_has_read_the_command() -> None:
    async def scenario(cluster: Cluster) -> None:
        for name, role in (("p0", Role.PREFILL), ("d0", Role.DECODE)):
            cluster.start(name, role)
        await cluster.pair_up()
        cluster.drivers["p0", "engine"].pause()  # as in a long step
        cluster.loop.call_later(0.5, cluster.drivers["p0", "engine"].resume)
        await one_request(cluster)
        first = await cluster.router.until("p0", FirstToken)
        assert isinstance(first, FirstToken) and 0.45 < first.queue_s < 0.55

    play(scenario)


def test_a_hand_off_waits_for_its_first_step_from_confirm_on() -> None:
    async def scenario(cluster: Cluster) -> None:
        for name, role in (("p0", Role.PREFILL), ("d0", Role.DECODE)):
            cluster.start(name, role)
        await cluster.pair_up()
        await one_request(cluster)
        current = cluster.workers["d0"].current
        assert current is not None
        while current.transfer.metrics.handed_off_leases == 0:
            await asyncio.sleep(0.00005)  # its engine hasn't heard of it yet
        cluster.drivers["d0", "engine"].pause()
        cluster.loop.call_later(0.5, cluster.drivers["d0", "engine"].resume)
        finished = await cluster.router.until("d0", SequenceFinished)
        assert isinstance(finished, SequenceFinished) and 0.45 < finished.decode_queue_s < 0.55

    play(scenario)


def test_a_hanging_engine_is_found_and_ends_the_process() -> None:
    async def scenario(cluster: Cluster) -> None:
        worker = cluster.start("b0", Role.BOTH)
        await cluster.router.until("b0", Load)
        cluster.router.ends["b0"].send(cluster.start_decode(1, None))
        await cluster.router.until("b0", DecodeStarted)
        hung_s = cluster.loop.time()
        cluster.drivers["b0", "engine"].pause()
        assert await cluster.running["b0"] == EXIT_UNSOUND
        assert worker.end is not None and worker.end.hangs
        assert 5.0 < cluster.loop.time() - hung_s < 6.5
        beat = cluster.router.of("b0", Heartbeat)[-1]
        assert isinstance(beat, Heartbeat) and beat.has_work, "the router sees it too"
        assert isinstance(await cluster.router.until("b0", Unsound), Unsound)

    play(scenario)


def test_a_role_change_asked_of_a_leaving_worker_is_no_reason_to_stay() -> None:
    async def scenario(cluster: Cluster) -> None:
        worker = cluster.start("b0", Role.BOTH)
        await cluster.router.until("b0", Load)
        cluster.router.ends["b0"].send(cluster.start_decode(1, None))
        cluster.router.ends["b0"].send(SetRole(Role.PREFILL))
        await cluster.router.until("b0", Granted)
        worker.drain()
        assert worker.not_ready == ["draining"]
        assert await cluster.running["b0"] == EXIT_OK
        await cluster.router.until("b0", SequenceFinished)

    play(scenario)
