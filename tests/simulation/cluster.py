"""Routers and workers of a simulated cluster: the real classes on the virtual loop, over in-memory ports."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

from deploy.worker_assembly import Worker
from deploy.worker_ports import LoadedModel, NetworkEnd, WorkerPorts, WorkerSetup
from kv_transfer.transports.faulty import FaultyNetwork
from kv_transfer.transports.memory import MemoryNetwork
from kv_transfer.transports.port import Network
from pdserve.clock import VirtualClock
from pdserve.engine.fake_runner import FakeFaults, FakeRunner
from pdserve.engine.port import Runner
from pdserve.errors import PdserveError
from pdserve.ids import Epoch, WorkerRef
from pdserve.messages import BlockCounts, Role
from pdserve.owner import Owner, Waiter
from pdserve.service.config import Config
from pdserve.service.lifecycle import EXIT_SUPERSEDED
from pdserve.service.metrics import WorkerMetrics
from pdserve.tokenizer import Tokenizer
from pdserve.worker.driver import LoopDriver, OnDeath
from router.app import RouterApp
from router.text import InlineWork
from tests.simulation.broken import BreakableRunner, CorruptOnDemand
from tests.simulation.wires import FabricDialer, NamesAreAddresses, RouterPlace, SessionFabric, address_of

RESTART_S = 0.7  # a supervisor's back-off

BlockCheck = Callable[[str, BlockCounts, int], None]
"""Told the counts of a worker's pool after each call of its engine owner: (worker id, counts, num_blocks)."""

MakeRunner = Callable[[str, int, int], Runner]
"""The runner of a new process: (worker id, num_blocks, block_size). No two processes that live may share one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delays:
    """Bounds of the seconds that things take, drawn evenly between 0 and them."""

    session_s: float = 0.004
    link_s: float = 0.002
    owner_s: float = 0.003
    copy_s: float | None = None
    one_sided: bool = False


class SimRouter:
    """One router process; may be killed and started anew."""

    def __init__(self, cluster: SimCluster, router_id: str) -> None:
        self.id = router_id
        self.app: RouterApp | None = None
        self._cluster = cluster
        self._num_starts = 0
        self._stop = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin; the app is there when the task has run."""
        self._stop = asyncio.Event()
        self._num_starts += 1
        self._task = self._cluster.tasks.create_task(self._run())

    async def _run(self) -> None:
        cluster = self._cluster
        app = RouterApp(
            cluster.config,
            cluster.clock,
            cluster.random_for(f"{self.id}/{self._num_starts}"),
            work=InlineWork(),
            router_id=self.id,
            tokenizer=cluster.tokenizer,
        )
        try:
            async with app:
                self.app = app
                await self._stop.wait()
                self.app = None
        finally:
            self.app = None

    def kill(self) -> None:
        """Its sessions are reset, its clients see their streams end."""
        self.app = None
        self._cluster.fabric.reset(router_id=self.id)
        if self._task is not None:
            self._task.cancel()

    async def drain(self) -> None:
        """As on SIGTERM: serve what runs, then end."""
        app = self.app
        if app is not None:
            await app.drain()
            self._stop.set()


class _CheckedOwner:
    """Reports the pool's counts after each call of the engine owner."""

    def __init__(self, inner: Owner, check: Callable[[], None]) -> None:
        self._inner = inner
        self._check = check

    def handle(self, message: object) -> None:
        self._inner.handle(message)
        self._check()

    def step(self) -> float | None:
        wait_s = self._inner.step()
        self._check()
        return wait_s


class SimWorker:
    """One process after another under a worker id; may be killed, stopped, continued, hung and drained.

    What ends by itself is started again after RESTART_S, as a supervisor would, unless it was superseded.
    """

    def __init__(
        self, cluster: SimCluster, worker_id: str, role: Role, faults: FakeFaults, block_size: int
    ) -> None:
        self.id = worker_id
        self.role = role
        self.slowness = 1.0
        self.num_blocks = cluster.num_blocks
        self.exit_codes: list[int] = []
        self.worker: Worker | None = None
        self.corrupts = CorruptOnDemand()
        self._faults = faults
        self._block_size = block_size
        self._cluster = cluster
        self._me: WorkerRef | None = None
        self._runner: BreakableRunner | None = None
        self._task: asyncio.Task[None] | None = None
        self._drivers: dict[str, LoopDriver] = {}
        self._network: Network | None = None
        self._running = asyncio.Event()
        self._running.set()
        self._ended = asyncio.Event()
        self._wanted = False

    # --- its life

    def start(self) -> None:
        """A new process under this id: new epoch, empty pool."""
        self._wanted = True
        self._drivers = {}
        self._running.set()
        self._ended = asyncio.Event()
        self._task = self._cluster.tasks.create_task(self._run())

    @property
    def alive(self) -> bool:
        return self.worker is not None

    @property
    def is_stopped(self) -> bool:
        return not self._running.is_set()

    async def _run(self) -> None:
        cluster = self._cluster
        name = f"{self.id}/{cluster.next_serial()}"
        source = cluster.random_for(name)
        me = self._me = WorkerRef(self.id, Epoch(cluster.clock.wall_ns(), source.getrandbits(64)))
        self._runner = BreakableRunner(self._make_runner())
        model = LoadedModel(
            name=self._runner.card.name,
            runner=self._runner,
            tokenizer_fingerprint=cluster.tokenizer.fingerprint,
            tokenizer_files=cluster.tokenizer.files,
        )
        routers = tuple(address_of(router_id) for router_id in cluster.routers)
        config = replace(cluster.config, worker=replace(cluster.config.worker, id=self.id, routers=routers))
        setup = WorkerSetup(me=me, config=config, model=model, host_id="host-" + self.id)
        worker = self.worker = Worker(setup, self._ports(me, name), WorkerMetrics(), self.role)
        code: int | None = None
        try:
            code = await worker.run()
        finally:
            if self.worker is worker:
                self.worker = None
            cluster.fabric.reset(worker=me)
            if code is not None:
                self._on_exit(code)

    def _make_runner(self) -> Runner:
        cluster = self._cluster
        if cluster.make_runner is not None:
            return cluster.make_runner(self.id, self.num_blocks, self._block_size)
        return FakeRunner(
            num_blocks=self.num_blocks,
            block_size=self._block_size,
            window_tokens=cluster.window_tokens,
            faults=self._faults,
        )

    def _on_exit(self, code: int) -> None:
        self.exit_codes.append(code)
        for driver in self._drivers.values():
            driver.stop()
        self._cluster.on_exit(self.id, code)
        self._ended.set()
        if self._wanted and code != EXIT_SUPERSEDED:
            asyncio.get_running_loop().call_later(RESTART_S, self._start_again)

    def _start_again(self) -> None:
        if self._wanted and self.worker is None:
            self.start()

    def kill(self) -> None:
        """As kill -9: what it had not sent is lost, its connections end. Nobody starts it again but `start`."""
        self._wanted = False
        if self._me is not None:
            self._cluster.fabric.reset(worker=self._me)
        for driver in self._drivers.values():
            driver.stop()
        if self._network is not None:
            self._network.close()
        if self._task is not None:
            self._task.cancel()
        self.worker = None
        self._ended.set()

    def drain(self) -> None:
        """As on SIGTERM."""
        if self.worker is not None:
            self.worker.drain()

    async def ended(self) -> None:
        """Returns when this process has ended."""
        await self._ended.wait()

    # --- SIGSTOP and SIGCONT, and what breaks inside

    async def running(self) -> None:
        """Returns when the process isn't stopped."""
        await self._running.wait()

    def stop(self) -> None:
        """Nothing of it moves until `resume`; what is sent to it waits in the network."""
        self._running.clear()
        for driver in self._drivers.values():
            driver.pause()
        for router_id in self._cluster.routers:
            self._cluster.fabric.cut(self.id, router_id)
        for other in self._cluster.workers:
            self._cluster.network.cut(other, self.id)

    def resume(self) -> None:
        """Go on as if no time had passed."""
        for router_id in self._cluster.routers:
            self._cluster.fabric.heal(self.id, router_id)
        for other in self._cluster.workers:
            self._cluster.network.heal(other, self.id)
        self._running.set()
        for driver in self._drivers.values():
            driver.resume()

    def hang_engine(self) -> None:
        """The engine's thread never comes back; the rest of the process lives."""
        if "engine" in self._drivers:
            self._drivers["engine"].pause()

    def resume_engine(self) -> None:
        """It comes back after all."""
        if "engine" in self._drivers:
            self._drivers["engine"].resume()

    def fail_next_step(self) -> None:
        """The next step raises, in a sound state."""
        if self._runner is not None:
            self._runner.fails_next = True

    # --- ports

    def _ports(self, me: WorkerRef, process: str) -> WorkerPorts:
        cluster, loop = self._cluster, asyncio.get_running_loop()
        owner_delay = cluster.drawn(f"{process}/owners", cluster.delays.owner_s)
        drivers = self._drivers

        def network(pool: memoryview, wake: Callable[[], None]) -> NetworkEnd:
            node = cluster.network.join(self.id, pool=pool, wake=wake)
            self._network = FaultyNetwork(node, cluster.clock, lambda dialled: self.corrupts)
            return NetworkEnd(self._network)

        def drive(name: str, owner: Owner, waiter: Waiter | None, on_death: OnDeath) -> LoopDriver:
            if name == "engine":
                owner = _CheckedOwner(owner, self._check_blocks)
            driver = LoopDriver(
                owner, loop, lambda: self.slowness * owner_delay(), f"{self.id}/{name}", on_death
            )
            drivers[name] = driver
            return driver

        return WorkerPorts(
            clock=cluster.clock,
            random_for=lambda owner: cluster.random_for(f"{process}/{owner}"),
            network=network,
            drive=drive,
            inbox=self._inbox,
            dialer=FabricDialer(cluster.fabric, me, self),
            resolver=NamesAreAddresses(),
            sleep=self._sleep,
        )

    async def _sleep(self, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        await self._running.wait()

    def _inbox(self, deliver: Callable[[object], None]) -> Callable[[object], None]:
        loop = asyncio.get_running_loop()

        def post(message: object) -> None:
            loop.call_soon(deliver, message)

        return post

    def _check_blocks(self) -> None:
        counts = self.counts()
        if counts is not None:
            self._cluster.check_blocks(self.id, counts, self.num_blocks)

    def counts(self) -> BlockCounts | None:
        """Of its pool; None while no process runs."""
        run = None if self.worker is None else self.worker.current
        return None if run is None else run.engine.pool.counts()


class SimCluster:
    """`async with SimCluster(...) as cluster:` on a VirtualLoop.

    make_runner  instead of fake ones, to which `window_tokens` and `faults` belong; its model goes with `tokenizer`
    """

    def __init__(
        self,
        config: Config,
        clock: VirtualClock,
        seed: object,
        *,
        router_ids: tuple[str, ...] = ("r0",),
        num_blocks: int = 64,
        block_size: int = 16,
        window_tokens: int = 4096,
        delays: Delays | None = None,
        faults: FakeFaults | None = None,
        make_runner: MakeRunner | None = None,
        tokenizer: Tokenizer | None = None,
        check_blocks: BlockCheck = lambda worker_id, counts, num_blocks: None,
        on_exit: Callable[[str, int], None] = lambda worker_id, code: None,
    ) -> None:
        self.config = config
        self.clock = clock
        self.seed = seed
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.window_tokens = window_tokens
        self.delays = delays or Delays()
        self.faults = faults or FakeFaults()
        self.make_runner = make_runner
        self.tokenizer = tokenizer or Tokenizer.fake()
        self.check_blocks = check_blocks
        self.on_exit = on_exit
        self._num_serials = 0
        self.tasks = asyncio.TaskGroup()
        self.routers = {router_id: SimRouter(self, router_id) for router_id in router_ids}
        self.workers: dict[str, SimWorker] = {}
        places: dict[str, RouterPlace] = dict(self.routers)
        self.fabric = SessionFabric(self.drawn("sessions", self.delays.session_s), self.tasks, places)
        copy_s = self.delays.copy_s
        self.network = MemoryNetwork(
            clock=clock,
            schedule=asyncio.get_running_loop().call_later,
            delay=self.drawn("links", self.delays.link_s),
            one_sided=self.delays.one_sided,
            copy_delay=None if copy_s is None else self.drawn("copies", copy_s),
        )

    async def __aenter__(self) -> Self:
        await self.tasks.__aenter__()
        for router in self.routers.values():
            router.start()
        await asyncio.sleep(0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self.workers.values():
            worker.kill()
        for router in self.routers.values():
            router.kill()
        try:
            await self.tasks.__aexit__(kind, error, trace)
        except* PdserveError as group:
            raise AssertionError(f"a process of the cluster raised: {group.exceptions}") from group

    def random_for(self, name: str) -> random.Random:
        """A source of its own for everything that draws, so that one's draws don't shift another's."""
        return random.Random(f"{self.seed}/{name}")

    def drawn(self, name: str, bound_s: float) -> Callable[[], float]:
        """Delays between 0 and a bound."""
        source = self.random_for(name)
        return lambda: bound_s * source.random()

    def next_serial(self) -> int:
        """1, 2, 3, …: what is started gets draws of its own."""
        self._num_serials += 1
        return self._num_serials

    def add_worker(
        self,
        worker_id: str,
        role: Role,
        *,
        num_blocks: int | None = None,
        faults: FakeFaults | None = None,
        block_size: int | None = None,
        delay_s: float = 0.0,
    ) -> SimWorker:
        """A worker, started after a while; in the place of a process of the same id, which lives on for now."""
        worker = SimWorker(self, worker_id, role, faults or self.faults, block_size or self.block_size)
        if num_blocks is not None:
            worker.num_blocks = num_blocks
        self.workers[worker_id] = worker
        if delay_s:
            asyncio.get_running_loop().call_later(delay_s, worker.start)
        else:
            worker.start()
        return worker
