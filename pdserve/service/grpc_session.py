"""Sessions over gRPC, as the router serves them and as the worker dials them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
import structlog

from pdserve.errors import (
    Incompatible,
    InvariantViolated,
    PdserveError,
    Unauthenticated,
    WorkerLost,
)
from pdserve.ids import Random, WorkerRef
from pdserve.messages import Down, Up
from pdserve.rpc import convert
from pdserve.rpc.v1 import session_pb2_grpc
from pdserve.service.grpc_stream import GrpcStream
from pdserve.service.later_version import CountUnknown, Tolerant
from pdserve.service.outbox import DEFAULT_LIMIT
from pdserve.service.peer_proof import RouterGuard, WorkerProof
from pdserve.service.proven_call import open_proven
from pdserve.service.rpc import open_channel
from pdserve.service.settings import ConfigError
from pdserve.service.tls import ClientTls
from pdserve.session import Session

log = structlog.get_logger()


class WorkersServicer(session_pb2_grpc.WorkersServicer):
    """The router's side.

    on_session     is given each session, and runs until it has ended
    tasks          where it runs: it outlives the call, so that it always learns the end from `receive`
    count_unknown  told of what a worker of a later version says
    count_crash    told of each session that a bug of this process ended
    """

    def __init__(
        self,
        *,
        on_session: Callable[[Session[Down, Up]], Awaitable[None]],
        guard: RouterGuard,
        tasks: asyncio.TaskGroup,
        count_unknown: CountUnknown,
        count_crash: Callable[[], None],
        outbox_limit: int = DEFAULT_LIMIT,
    ) -> None:
        self._on_session = on_session
        self._count_crash = count_crash
        self._count_unknown = count_unknown
        self._guard = guard
        self._tasks = tasks
        self._outbox_limit = outbox_limit

    async def Session(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]  # noqa: N802
        await self._guard.admit(context)
        decode: Tolerant[Up] = Tolerant(convert.up_from_proto, self._count_unknown)
        session: GrpcStream[Down, Up] = GrpcStream(
            context.peer(), convert.down_to_proto, decode, self._outbox_limit
        )
        self._tasks.create_task(self._serve(session))
        try:
            await session.run(context.read, context.write)
        except Exception as bug:
            session.crash(bug)
            raise InvariantViolated("internal error of the router") from bug
        finally:  # cancelled if the connection is gone
            session.end("connection lost")
        if session.refusal is not None:
            raise session.refusal
        if session.close_reason is not None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, session.close_reason)

    async def _serve(self, session: GrpcStream[Down, Up]) -> None:
        try:
            await self._on_session(session)
        except Exception:  # outermost frame of one session; the others go on
            log.exception("session.crashed", peer=session.peer)
            self._count_crash()
            session.refuse(InvariantViolated("internal error of the router"))
        finally:
            session.close("served")

    async def CacheEvents(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]  # noqa: N802
        """Of workers before 1.2, until they end it: refused, they would dial it again each second."""
        await self._guard.admit(context)
        await asyncio.get_running_loop().create_future()


class GrpcDialer:
    """The worker's side. Event-loop thread only.

    tasks          where the sessions' readers and writers run
    connect_s      how long a call may take to be answered at all
    count_unknown  told of what a router of a later version says
    """

    def __init__(
        self,
        worker: WorkerRef,
        *,
        keepalive_s: float,
        connect_s: float,
        max_message_bytes: int,
        secret: bytes | None,
        tls: ClientTls | None = None,
        random: Random,
        tasks: asyncio.TaskGroup,
        count_unknown: CountUnknown,
        outbox_limit: int = DEFAULT_LIMIT,
    ) -> None:
        self._worker = worker
        self._count_unknown = count_unknown
        self._keepalive_s = keepalive_s
        self._connect_s = connect_s
        self._max_message_bytes = max_message_bytes
        self._secret = secret
        self._tls = tls
        self._random = random
        self._tasks = tasks
        self._outbox_limit = outbox_limit
        self._running: dict[asyncio.Task[None], None] = {}

    async def dial(self, address: str) -> Session[Up, Down]:
        """Open a session. Raises WorkerLost if nobody answers there; Unauthenticated or Incompatible, which an
        operator must see to, if the router refuses."""
        try:
            channel = open_channel(
                address,
                keepalive_s=self._keepalive_s,
                max_message_bytes=self._max_message_bytes,
                tls=self._tls,
            )
        except ConfigError as error:  # a certificate is just being replaced
            raise _not_opened(error, address) from error
        try:
            call = await self._call(channel, address)
        except BaseException as error:
            await channel.close(None)
            if isinstance(error, PdserveError) and not isinstance(error, Unauthenticated | Incompatible):
                raise _not_opened(error, address) from error
            raise
        decode: Tolerant[Down] = Tolerant(convert.down_from_proto, self._count_unknown)
        session: GrpcStream[Up, Down] = GrpcStream(address, convert.up_to_proto, decode, self._outbox_limit)
        task = self._tasks.create_task(_run_dialed(session, call, channel))
        self._running[task] = None
        task.add_done_callback(lambda done: self._running.pop(done, None))
        return session

    async def closed(self) -> None:
        """Return when no session is open: what they still had to say has gone out, or never will."""
        if self._running:
            await asyncio.wait(tuple(self._running))

    async def _call(self, channel: grpc.aio.Channel, address: str) -> Any:
        """A call that the router has let in."""
        begin: Any = session_pb2_grpc.WorkersStub(channel).Session
        proof = WorkerProof(self._worker, self._secret, self._random)
        return await open_proven(lambda metadata: begin(metadata=metadata), proof, address, self._connect_s)


async def _run_dialed(session: GrpcStream[Up, Down], call: Any, channel: grpc.aio.Channel) -> None:
    try:
        await session.run(call.read, call.write, call.done_writing)
    except Exception as bug:  # its reader, the worker, ends by it
        log.exception("session.crashed", peer=session.peer)
        session.crash(bug)
    finally:
        session.end("connection lost")
        call.cancel()
        await channel.close(None)


def _not_opened(error: PdserveError, address: str) -> WorkerLost:
    return WorkerLost("no session with the router", peer=address, reason=str(error))
