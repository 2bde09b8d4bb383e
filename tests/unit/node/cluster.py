"""Whole workers over in-memory ports under virtual time, and the router that a test plays."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable, Sequence

from pdserve.cli.roles import ROLES
from pdserve.engine.fake_runner import FakeFaults, FakeRunner
from pdserve.errors import WorkerLost
from pdserve.ids import Epoch, WorkerRef
from pdserve.kv_memory import HostMemory, KvMemory
from pdserve.messages import (
    DecodeStarted,
    Down,
    DownHeartbeat,
    Granted,
    Heartbeat,
    Hello,
    Load,
    Pair,
    PairState,
    Role,
    StartDecode,
    StartPrefill,
    Step,
    Up,
    Welcome,
)
from pdserve.node.ports import LoadedModel, NetworkEnd, WorkerPorts, WorkerSetup
from pdserve.node.worker import Worker
from pdserve.owner import Post, Waiter
from pdserve.sampling import SampleKey, SamplingParams
from pdserve.service.config import Config, EngineConfig, WorkerConfig
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
        self.metrics: dict[str, WorkerMetrics] = {}
        self.to_loop: dict[str, Post] = {}

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
            return NetworkEnd(self.network.join(name, memory=StagedMemory(memory), wake=wake), memory)

        worker_name = name

        def drive(name: str, waiter: Waiter | None, on_death: OnDeath) -> LoopDriver:
            driver = LoopDriver(self.loop, self.delay, name, on_death)
            self.drivers[worker_name, name] = driver
            return driver

        def inbox(deliver: Callable[[object], None]) -> Post:
            post = self.to_loop[worker_name] = DelayedInbox(self.loop, self.delay, deliver).post
            return post

        ports = WorkerPorts(
            clock=self.clock,
            random_for=lambda owner: self.random,
            network=network,
            drive=drive,
            inbox=inbox,
            dialer=self,
            resolver=self,
            roles=ROLES,
            background=at_once,
        )
        metrics = self.metrics[name] = WorkerMetrics()
        worker = Worker(setup, ports, metrics, role)
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

    def start_decode(self, handle: int, source: WorkerRef | None, key: SampleKey = KEY) -> StartDecode:
        return StartDecode(
            handle=handle,
            token_ids=IDS,
            num_prompt_tokens=100,
            key=key,
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


async def one_request(cluster: Cluster, handle: int = 1, key: SampleKey = KEY) -> None:
    """A request through both workers, as a router conducts it."""
    router = cluster.router
    router.ends["d0"].send(cluster.start_decode(handle, router.hellos["p0"].worker, key))
    granted = await router.until("d0", Granted)
    assert isinstance(granted, Granted)
    router.ends["p0"].send(
        StartPrefill(
            handle=handle, token_ids=IDS, num_prompt_tokens=100, key=key, deadline_left_s=60.0, num_strikes=0,
            lease_id=granted.lease_id, decode_worker=router.hellos["d0"].worker,
            num_skip_blocks=granted.num_cached_blocks,
        )
    )  # fmt: skip
