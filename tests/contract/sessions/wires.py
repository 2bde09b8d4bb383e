"""The two implementations of a session behind one face, so that one suite runs over both."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from pdserve.clock import SystemClock
from pdserve.ids import Epoch, WorkerRef
from pdserve.messages import Down, Up
from pdserve.rpc.v1 import session_pb2_grpc
from pdserve.service.grpc_session import GrpcDialer, WorkersServicer
from pdserve.service.later_version import CountUnknown
from pdserve.service.peer_proof import RouterGuard
from pdserve.service.rpc import bind, make_server
from pdserve.session import Session
from tests.contract.sessions.proxy import Proxy
from tests.support.memory_session import MemoryWire

WORKER = WorkerRef("w0", Epoch(7, 9))
OUTBOX_LIMIT = 2_000
KEEPALIVE_S = 0.5  # shorter ones end sessions on a busy machine


@dataclass(frozen=True)
class Wire:
    """One open session. `cut`: nothing passes any more, and keepalive must find out."""

    worker: Session[Up, Down]
    router: Session[Down, Up]
    cut: Callable[[], None]


@asynccontextmanager
async def grpc_wire() -> AsyncIterator[Wire]:
    """A dialer and a server on loopback, and between them a proxy that can be cut."""
    opened: asyncio.Future[Session[Down, Up]] = asyncio.get_running_loop().create_future()
    over = asyncio.Event()

    async def on_session(session: Session[Down, Up]) -> None:
        opened.set_result(session)
        await over.wait()

    async with (
        asyncio.TaskGroup() as tasks,
        grpc_server(on_session, tasks) as address,
        Proxy(address) as proxy,
    ):
        worker = await make_dialer(tasks).dial(proxy.address)
        yield Wire(worker, await opened, proxy.cut)
        worker.close("the test is over")
        over.set()


@asynccontextmanager
async def memory_wire() -> AsyncIterator[Wire]:
    """On the real loop, with delays of a few hundred µs."""
    source = random.Random(2)
    wire = MemoryWire(
        asyncio.get_running_loop().call_later,
        lambda: source.random() * 5e-4,
        silent_s=2 * KEEPALIVE_S,
        outbox_limit=OUTBOX_LIMIT,
    )
    yield Wire(wire.worker_end, wire.router_end, wire.cut)


async def no_session(session: Session[Down, Up]) -> None:
    """For suites about something else."""
    raise AssertionError("no session was expected")


def no_unknown(channel: str, what: str) -> None:
    """For suites in which all speak one version."""
    raise AssertionError(f"unknown {what} on {channel}")


def no_crash() -> None:
    """For suites without bugs."""


@asynccontextmanager
async def grpc_server(
    on_session: Callable[[Session[Down, Up]], Awaitable[None]],
    tasks: asyncio.TaskGroup,
    *,
    secret: bytes | None = None,
    count_unknown: CountUnknown = no_unknown,
    count_crash: Callable[[], None] = no_crash,
) -> AsyncIterator[str]:
    """A router's server with the Workers service alone; yields its address."""
    source = random.Random(1)
    server = make_server(keepalive_s=KEEPALIVE_S, max_message_bytes=1 << 26, random=source)
    servicer = WorkersServicer(
        on_session=on_session,
        guard=RouterGuard("r0", secret, SystemClock(), source),
        tasks=tasks,
        count_unknown=count_unknown,
        count_crash=count_crash,
        outbox_limit=OUTBOX_LIMIT,
    )
    session_pb2_grpc.add_WorkersServicer_to_server(servicer, server)
    address = bind(server, "127.0.0.1:0")
    await server.start()
    try:
        yield address
    finally:
        await server.stop(None)


def make_dialer(
    tasks: asyncio.TaskGroup, secret: bytes | None = None, count_unknown: CountUnknown = no_unknown
) -> GrpcDialer:
    """A worker's dialer with the suite's limits."""
    return GrpcDialer(
        WORKER,
        keepalive_s=KEEPALIVE_S,
        connect_s=20.0,
        max_message_bytes=1 << 26,
        secret=secret,
        random=random.Random(3),
        tasks=tasks,
        count_unknown=count_unknown,
        outbox_limit=OUTBOX_LIMIT,
    )
