"""Sessions between simulated workers and routers: who dials whom, and how they break."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from pdserve.errors import PdserveError, WorkerLost
from pdserve.ids import WorkerRef
from pdserve.messages import Down, Up
from pdserve.session import Session
from router.app import RouterApp
from tests.simulation.tape import Tape
from tests.support.memory_session import MemoryWire

S = TypeVar("S")
R = TypeVar("R")


class Gate(Protocol):
    """A process that may be stopped for a while."""

    async def running(self) -> None:
        """Returns at once, or when the process is continued."""
        ...


class RouterPlace(Protocol):
    """A simulated router process."""

    @property
    def app(self) -> RouterApp | None: ...


@dataclass(slots=True)
class _Open:
    wire: MemoryWire
    worker_id: str
    router_id: str
    worker: WorkerRef


class SessionFabric:
    """All sessions of the simulated cluster.

    silent_s  how long a cut may last before keepalive ends a session
    random    whether what a killed process had sent still arrives
    """

    def __init__(
        self,
        delay: Callable[[], float],
        tasks: asyncio.TaskGroup,
        routers: dict[str, RouterPlace],
        *,
        silent_s: float,
        random: random.Random,
        tape: Tape,
    ) -> None:
        self._delay = delay
        self._tasks = tasks
        self._routers = routers
        self._silent_s = silent_s
        self._random = random
        self._tape = tape
        self._open: list[_Open] = []
        self._cut: dict[tuple[str, str], tuple[bool, bool]] = {}  # (worker, router) -> up, down

    async def dial(self, worker: WorkerRef, router_id: str) -> Session[Up, Down]:
        """A new session after a drawn delay. Raises WorkerLost if the router isn't there or can't be reached."""
        await asyncio.sleep(self._delay())
        app = self._routers[router_id].app
        if app is None or (worker.id, router_id) in self._cut:
            raise WorkerLost("nobody answers", router=router_id)
        loop = asyncio.get_running_loop()
        wire = MemoryWire(
            loop.call_later, self._delay, worker=worker.id, router=router_id, silent_s=self._silent_s
        )
        entry = _Open(wire, worker.id, router_id, worker)
        self._open.append(entry)
        worker_end: Session[Up, Down] = wire.worker_end
        router_end: Session[Down, Up] = wire.router_end
        if self._tape.full:
            worker_end = TapedSession(worker_end, self._tape, worker.id, router_id)
            router_end = TapedSession(router_end, self._tape, router_id, worker.id)
        served = self._tasks.create_task(app.attach_session(router_end))
        served.add_done_callback(lambda _: self._open.remove(entry))
        return worker_end

    def reset(
        self, *, worker: WorkerRef | None = None, worker_id: str | None = None, router_id: str | None = None
    ) -> None:
        """End the open sessions of a worker, or one process of it, or a router: a lost connection."""
        for entry in list(self._open):
            if _fits(entry, worker_id, router_id) and worker in (None, entry.worker):
                entry.wire.reset()

    def kill(self, *, worker: WorkerRef | None = None, router_id: str | None = None) -> None:
        """A process is gone. What it had sent arrives, or is lost, as the draw says."""
        arrives = self._random.random() < 0.5
        for entry in list(self._open):
            if not (_fits(entry, None, router_id) and worker in (None, entry.worker)):
                continue
            if not arrives:
                entry.wire.reset()
            elif router_id is not None:
                entry.wire.kill_router()
            else:
                entry.wire.kill_worker()

    def cut(self, worker_id: str, router_id: str, *, up: bool = True, down: bool = True) -> None:
        """Nothing passes in these directions until `heal`; nobody can dial meanwhile."""
        self._cut[worker_id, router_id] = (up, down)
        for entry in self._open:
            if _fits(entry, worker_id, router_id):
                entry.wire.cut(up=up, down=down)

    def heal(self, worker_id: str, router_id: str) -> None:
        """End a cut."""
        if self._cut.pop((worker_id, router_id), None) is not None:
            for entry in self._open:
                if _fits(entry, worker_id, router_id):
                    entry.wire.heal()


def _fits(entry: _Open, worker_id: str | None, router_id: str | None) -> bool:
    return worker_id in (None, entry.worker_id) and router_id in (None, entry.router_id)


class TapedSession(Generic[S, R]):
    """One end of a session, which tells the tape what leaves and what arrives."""

    def __init__(self, inner: Session[S, R], tape: Tape, here: str, there: str) -> None:
        self._inner = inner
        self._tape = tape
        self._way = f"{here}>{there} sends"
        self._back = f"{there}>{here} has"

    @property
    def peer(self) -> str:
        return self._inner.peer

    def send(self, message: S) -> None:
        self._tape.message(self._way, message)
        self._inner.send(message)

    def when_idle(self, source: Callable[[], S | None]) -> Callable[[], None]:
        def taped() -> S | None:
            message = source()
            if message is not None:
                self._tape.message(self._way, message)
            return message

        return self._inner.when_idle(taped)

    async def receive(self) -> R:
        message = await self._inner.receive()
        self._tape.message(self._back, message)
        return message

    def close(self, reason: str) -> None:
        self._inner.close(reason)

    def refuse(self, error: PdserveError) -> None:
        self._inner.refuse(error)


class FabricDialer:
    """The SessionDialer of one simulated worker."""

    def __init__(self, fabric: SessionFabric, me: WorkerRef, gate: Gate) -> None:
        self._fabric = fabric
        self._me = me
        self._gate = gate

    async def dial(self, address: str) -> Session[Up, Down]:
        await self._gate.running()
        return await self._fabric.dial(self._me, router_at(address))


def address_of(router_id: str) -> str:
    """The address under which workers dial a simulated router."""
    return f"{router_id}:1"


def router_at(address: str) -> str:
    """The router of an address."""
    return address.removesuffix(":1")


class NamesAreAddresses:
    """The Resolver of a simulation."""

    async def resolve(self, name: str) -> Sequence[str]:
        return (name,)
