"""Routers and workers of a simulated cluster: the real classes on the virtual loop, over in-memory ports."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from pdserve.clock import Clock
from pdserve.engine.fake_rule import FakeRule
from pdserve.engine.fake_runner import FakeFaults
from pdserve.engine.port import Runner
from pdserve.errors import PdserveError
from pdserve.kv_memory import XXH3_64
from pdserve.messages import Role
from pdserve.service.config import Config
from pdserve.tokenizer import Tokenizer
from pdserve.tracing import Tracer
from pdserve.worker.paced_runner import StepTime
from tests.simulation.clocks import drawn_clock
from tests.simulation.observer import Observer, Unobserved
from tests.simulation.sim_router import SimRouter
from tests.simulation.sim_worker import SimWorker, worker_of
from tests.simulation.tape import Tape
from tests.simulation.wires import RouterPlace, SessionFabric
from tests.support.loop_cuda_ipc import IpcFabric
from tests.support.loop_nccl import NcclFabric
from tests.support.memory_channel import WireKind
from tests.support.memory_network import MemoryNetwork
from tests.support.virtual_clock import VirtualClock

__all__ = ["Delays", "MakeRunner", "SimCluster", "SimRouter", "SimWorker"]

MakeRunner = Callable[[str, int, int], Runner]
"""The runner of a new process: (worker id, num_blocks, block_size). No two processes that live may share one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delays:
    """Bounds of the seconds that things take, drawn evenly between 0 and them.

    kind, copy_s  how the links move pieces; copy_s: that a one-sided reader's device takes, None: D reads within a turn
    """

    session_s: float = 0.004
    link_s: float = 0.002
    owner_s: float = 0.003
    copy_s: float | None = None
    kind: WireKind = WireKind.TWO_SIDED


class SimCluster:
    """`async with SimCluster(...) as cluster:` on a VirtualLoop.

    make_runner  instead of fake ones, to which `window_tokens`, `rule` and `faults` belong; its model goes with
                 `tokenizer`
    step_s       what a step of the fake runners takes, none if None; not for runs that stop or hang workers
    device_checksums  what the memory of fake devices offers (posted links)
    skewed       whether each process has clocks of its own
    launches_ahead  runners compute as late as a device may, and take a step before the last one is read
    tracer       of all processes
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
        rule: FakeRule | None = None,
        faults: FakeFaults | None = None,
        make_runner: MakeRunner | None = None,
        step_s: StepTime | None = None,
        tokenizer: Tokenizer | None = None,
        device_checksums: tuple[str, ...] = (XXH3_64,),
        skewed: bool = False,
        launches_ahead: bool = False,
        observer: Observer | None = None,
        tape: Tape | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self.config = config
        self.clock = clock
        self.seed = seed
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.window_tokens = window_tokens
        self.delays = delays or Delays()
        self.rule = rule or FakeRule()
        self.faults = faults or FakeFaults()
        self.make_runner = make_runner
        self.step_s = step_s
        self.tokenizer = tokenizer or Tokenizer.fake()
        self.observer = observer or Unobserved()
        self.tape = tape or Tape(clock, full=False)
        self.device_checksums = device_checksums
        self.tracer = tracer or Tracer.off()
        self.launches_ahead = launches_ahead
        self._skewed = skewed
        self._num_serials = 0
        self.tasks = asyncio.TaskGroup()
        self.routers = {router_id: SimRouter(self, router_id) for router_id in router_ids}
        self.workers: dict[str, SimWorker] = {}
        self._made: list[SimWorker] = []  # also those whose place another has taken
        places: dict[str, RouterPlace] = dict(self.routers)
        self.fabric = SessionFabric(
            self.drawn("sessions", self.delays.session_s),
            self.tasks,
            places,
            silent_s=2 * config.timeouts.keepalive_s,
            random=self.random_for("fabric"),
            tape=self.tape,
        )
        copy_s = self.delays.copy_s
        self.network = MemoryNetwork(
            clock=clock,
            schedule=asyncio.get_running_loop().call_later,
            delay=self.drawn("links", self.delays.link_s),
            kind=self.delays.kind,
            copy_delay=None if copy_s is None else self.drawn("copies", copy_s),
            host_of=worker_of,
        )
        self.nccl = NcclFabric(
            schedule=asyncio.get_running_loop().call_later,
            delay=self.drawn("nccl", self.delays.link_s),
            random=self.random_for("nccl"),
            holds=self.network.is_cut,
        )
        self.network.on_heal = self.nccl.heal
        self.ipc = IpcFabric(
            schedule=asyncio.get_running_loop().call_later, delay=self.drawn("ipc", 2 * self.delays.link_s)
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
        for worker in self._made:
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

    def clock_for(self, process: str) -> Clock:
        """The clocks of a process: the simulation's, or skewed ones."""
        return drawn_clock(self.clock, self.random_for(f"{process}/clock")) if self._skewed else self.clock

    def processes(self, worker_id: str) -> list[SimWorker]:
        """All that were ever made under an id, those too whose place another has taken."""
        return [worker for worker in self._made if worker.id == worker_id]

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
        weights: str = "",
        delay_s: float = 0.0,
    ) -> SimWorker:
        """A worker, started after a while; in the place of a process of the same id, which lives on for now.

        weights  fingerprint of other weights than the others'
        """
        worker = SimWorker(
            self,
            worker_id,
            role,
            faults=faults or self.faults,
            block_size=block_size or self.block_size,
            num_blocks=num_blocks or self.num_blocks,
            weights=weights,
        )
        self.workers[worker_id] = worker
        self._made.append(worker)
        if delay_s:
            asyncio.get_running_loop().call_later(delay_s, worker.start)
        else:
            worker.start()
        return worker
