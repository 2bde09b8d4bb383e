"""One simulated worker: process after process under one id."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from kv_transfer.transports.staged import StagedNetwork
from kv_transfer.transports.staging import Staging
from pdserve.block_messages import BlockCounts
from pdserve.cli.roles import ROLES
from pdserve.engine.block_pool import BlockPool
from pdserve.engine.fake_runner import FakeDevice, FakeFaults, FakeRunner
from pdserve.engine.port import Runner
from pdserve.ids import Epoch, WorkerRef
from pdserve.kv_memory import HostMemory, KvMemory
from pdserve.messages import Role
from pdserve.node.ports import LoadedModel, NetworkEnd, WorkerPorts, WorkerSetup
from pdserve.node.worker import Worker
from pdserve.owner import Owner, Post, Waiter
from pdserve.service.lifecycle import EXIT_SUPERSEDED
from pdserve.service.metrics import WorkerMetrics
from pdserve.worker.driver import OnDeath
from pdserve.worker.paced_runner import PacedRunner
from tests.simulation.broken import BreakableRunner, WatchedRunner
from tests.simulation.devices import ProcessDevice
from tests.simulation.links import LinkTrouble, PoolWatch, SimNetwork
from tests.simulation.loop_driver import DelayedInbox, LoopDriver, at_once
from tests.simulation.ranked_runner import RankedFakeRunner
from tests.simulation.step_time import StepClock
from tests.simulation.tape import Tape
from tests.simulation.wires import FabricDialer, NamesAreAddresses, address_of
from tests.support.launching_runner import LateRunner
from tests.support.memories import DeviceMemory, StagedMemory
from tests.support.memory_channel import WireKind

if TYPE_CHECKING:
    from tests.simulation.cluster import SimCluster

RESTART_S = 0.7  # a supervisor's back-off


def worker_of(node: str) -> str:
    """The worker id of a node's name in the links' network; each process listens at an address of its own."""
    return node.partition("#")[0]


class SimWorker:
    """May be killed, stopped, continued, hung, slowed and drained.

    What ends by itself is started again after RESTART_S, as a supervisor would (`is_restarted`), unless it was
    superseded.
    """

    def __init__(
        self,
        cluster: SimCluster,
        worker_id: str,
        role: Role,
        *,
        faults: FakeFaults,
        block_size: int,
        num_blocks: int,
        weights: str = "",
    ) -> None:
        self.id = worker_id
        self.role = role
        self.slowness = 1.0
        self.engine_slowness = 1.0  # besides, of its engine alone
        self.num_blocks = num_blocks
        self.exit_codes: list[int] = []
        self.worker: Worker | None = None
        self.ref: WorkerRef | None = None
        self.clock = StepClock(cluster.clock_for(f"worker {worker_id} {cluster.next_serial()}"))
        self.trouble = LinkTrouble(cluster.random_for(f"{worker_id}/trouble"))
        self._faults = faults
        self._block_size = block_size
        self._weights = weights
        self._cluster = cluster
        self._runner: BreakableRunner | None = None
        self._task: asyncio.Task[None] | None = None
        self._drivers: dict[str, LoopDriver] = {}
        self._inboxes: list[DelayedInbox] = []
        self._network: SimNetwork | None = None
        self._device: ProcessDevice | None = None
        self._running = asyncio.Event()
        self._running.set()
        self._ended = asyncio.Event()
        self.is_restarted = True
        self._wanted = False
        self._lives = False

    # --- its life

    def start(self) -> None:
        """A new process under this id, if none lives: new epoch, empty pool."""
        self._wanted = True
        if self._lives:
            return
        self._lives = True
        self._drivers = {}
        self._inboxes = []
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
        me = self.ref = WorkerRef(self.id, Epoch(self.clock.wall_ns(), source.getrandbits(64)))
        runner = WatchedRunner(self._make_runner(), self._pool, self._violate, self._weights)
        self._runner = BreakableRunner(runner, lambda what: cluster.observer.on_failure(self, what))
        model = LoadedModel(
            name=self._runner.card.name,
            runner=LateRunner(self._runner) if cluster.launches_ahead else self._runner,
            tokenizer_fingerprint=cluster.tokenizer.fingerprint,
            tokenizer_files=cluster.tokenizer.files,
            eos_token_ids=cluster.tokenizer.eos_token_ids,
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
            cluster.fabric.kill(worker=me)
            if code is not None:
                self._on_exit(code)

    def _make_runner(self) -> Runner:
        cluster = self._cluster
        if cluster.make_runner is not None:
            return cluster.make_runner(self.id, self.num_blocks, self._block_size)
        num_ranks = self._draw_ranks()
        make = FakeRunner if num_ranks == 1 else functools.partial(RankedFakeRunner, num_ranks)
        runner = make(
            num_blocks=self.num_blocks,
            block_size=self._block_size,
            window_tokens=cluster.window_tokens,
            rule=cluster.rule,
            faults=self._faults,
            make_memory=self._make_memory,
        )
        return runner if cluster.step_s is None else PacedRunner(runner, cluster.step_s, self.clock.spend)

    def _draw_ranks(self) -> int:
        """Of this incarnation: in one cluster of eight each has its own number. Nothing else is drawn otherwise for it,
        and nobody can tell it from outside."""
        if self._cluster.random_for("ranks").random() >= 1 / 8:
            return 1
        return self._cluster.random_for(f"{self.id}/ranks/{len(self.exit_codes)}").choice((1, 2, 4))

    def _make_memory(self, num_bytes: int) -> FakeDevice:
        """Links that are posted, or over CUDA IPC, are those between devices; staged ones, of devices with any."""
        kind = self._cluster.delays.kind
        if kind in (WireKind.POSTED, WireKind.NCCL, WireKind.CUDA_IPC):
            device = "cpu" if kind is WireKind.POSTED else "device:0"
            return DeviceMemory(num_bytes, self._cluster.device_checksums, device)
        if kind is WireKind.STAGED and not self.id.endswith("1"):
            return DeviceMemory(num_bytes, ())
        return HostMemory(num_bytes)

    def _on_exit(self, code: int) -> None:
        self._lives = False
        self.exit_codes.append(code)
        self._stop_drivers()
        if self._device is not None:
            self._device.die()
        self._cluster.observer.on_exit(self, code)
        self._ended.set()
        if self._wanted and self.is_restarted and code != EXIT_SUPERSEDED:
            asyncio.get_running_loop().call_later(RESTART_S, self._start_again)

    def _start_again(self) -> None:
        if self._wanted:
            self.start()

    def _stop_drivers(self) -> None:
        for driver in self._drivers.values():
            driver.stop()
        for inbox in self._inboxes:
            inbox.stop()

    def kill(self) -> None:
        """As kill -9: what it had not sent is lost, its connections end. Nobody starts it again but `start`."""
        self._wanted = False
        self._lives = False
        if self.ref is not None:
            self._cluster.fabric.kill(worker=self.ref)
        self._stop_drivers()
        if self._network is not None:
            self._network.close()
        if self._device is not None:
            self._device.die()
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
        """Nothing of it moves until `resume`; what is sent to it waits in the network, what it had sent arrives."""
        self._running.clear()
        for driver in self._drivers.values():
            driver.pause()
        for inbox in self._inboxes:
            inbox.pause()
        for router_id in self._cluster.routers:
            self._cluster.fabric.cut(self.id, router_id, up=False)
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
        for inbox in self._inboxes:
            inbox.resume()

    def pause_transfer(self) -> None:
        """The transfer owner's thread gets no time; the rest of the process lives."""
        self._drivers["transfer"].pause()

    def resume_transfer(self) -> None:
        """It goes on."""
        self._drivers["transfer"].resume()

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

    def lose_next_row(self) -> None:
        """The first row of the next step fails."""
        if self._runner is not None:
            self._runner.loses_next_row = True

    # --- ports

    def _ports(self, me: WorkerRef, process: str) -> WorkerPorts:
        cluster, loop = self._cluster, asyncio.get_running_loop()
        drawn_delay = cluster.drawn(f"{process}/owners", cluster.delays.owner_s)
        drivers, inboxes = self._drivers, self._inboxes
        device = self._device = ProcessDevice(cluster, self.id, self.clock)

        def delay() -> float:
            return self.slowness * drawn_delay() + self.clock.ahead_s

        def network(memory: KvMemory, wake: Callable[[], None]) -> NetworkEnd:
            assert isinstance(memory, HostMemory | DeviceMemory)
            block_bytes = memory.num_bytes // self.num_blocks
            watch = PoolWatch(self.id, block_bytes, self.num_blocks, self._pool, cluster.observer.violate)
            staging: Staging | None = None
            if isinstance(memory, DeviceMemory) and cluster.delays.kind is WireKind.STAGED:
                staging = device.stage(memory, block_bytes, watch)
            seen: KvMemory = memory if staging is None else staging.memory
            staged = StagedMemory(memory, seen)
            device.take(staged, wake, watch)
            node = cluster.network.join(
                f"{self.id}#{cluster.next_serial()}", memory=staged, wake=wake, watch=watch, ipc=device.ipc
            )
            inner = device.over(node)
            self._network = SimNetwork(inner, self.clock, self.trouble, staged, watch, cluster.tape, self.id)
            if staging is not None:
                return NetworkEnd(StagedNetwork(self._network, staging), seen)
            return NetworkEnd(self._network, seen)

        def engine_delay() -> float:
            return self.engine_slowness * delay()

        def drive(name: str, waiter: Waiter | None, on_death: OnDeath) -> LoopDriver:
            on_turn = self._end_engine_turn if name == "engine" else self._check_hand_offs

            def watch(owner: Owner) -> Owner:
                return _ObservedOwner(owner, cluster.tape, self.id + ": ", on_turn)

            drawn = engine_delay if name == "engine" else delay
            driver = drivers[name] = LoopDriver(loop, drawn, f"{self.id}/{name}", on_death, watch)
            return driver

        def inbox(deliver: Callable[[object], None]) -> Post:
            made = DelayedInbox(loop, delay, deliver)
            inboxes.append(made)
            return made.post

        return WorkerPorts(
            clock=self.clock,
            random_for=lambda owner: cluster.random_for(f"{process}/{owner}"),
            network=network,
            drive=drive,
            inbox=inbox,
            dialer=FabricDialer(cluster.fabric, me, self),
            resolver=NamesAreAddresses(),
            roles=ROLES,
            background=at_once,
            sleep=self._sleep,
            tracer=cluster.tracer,
        )

    def _end_engine_turn(self) -> None:
        """A step that takes time keeps the engine owner from its messages so long."""
        took_s = self.clock.catch_up()
        if took_s > 0.0:
            self.hang_engine()
            asyncio.get_running_loop().call_later(took_s, self.resume_engine)
        self._cluster.observer.on_turn(self)

    async def _sleep(self, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        await self._running.wait()

    # --- its pool

    def _pool(self) -> BlockPool | None:
        run = None if self.worker is None else self.worker.current
        return None if run is None else run.engine.pool

    def _violate(self, what: str) -> None:
        self._cluster.observer.violate(f"{self.id}: {what}")

    def _check_hand_offs(self) -> None:
        """A hand-off has happened only when the prefill worker has confirmed it."""
        run = None if self.worker is None else self.worker.current
        if run is None or self._network is None:
            return
        if run.transfer.metrics.handed_off_leases > self._network.num_confirms:
            self._violate("a sequence runs on blocks that nobody has confirmed")

    def counts(self) -> BlockCounts | None:
        """Of its pool; None while no process runs."""
        pool = self._pool()
        return None if pool is None else pool.counts()


class _ObservedOwner:
    """Names itself on the tape during each call, and tells after it."""

    def __init__(self, inner: Owner, tape: Tape, who: str, on_turn: Callable[[], None]) -> None:
        self._inner = inner
        self._tape = tape
        self._who = who
        self._on_turn = on_turn

    def handle(self, message: object) -> None:
        self._tape.who = self._who
        self._inner.handle(message)
        self._tape.who = ""
        self._on_turn()

    def step(self) -> float | None:
        self._tape.who = self._who
        wait_s = self._inner.step()
        self._tape.who = ""
        self._on_turn()
        return wait_s
