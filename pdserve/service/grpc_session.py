"""Sessions and cache events over gRPC, as the router serves them and as the worker dials them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
import structlog

from pdserve.block_messages import CacheEvent
from pdserve.errors import Incompatible, PdserveError, WorkerLost, primary
from pdserve.ids import Random, WorkerRef
from pdserve.messages import Down, Up
from pdserve.rpc import convert
from pdserve.rpc.v1 import session_pb2, session_pb2_grpc
from pdserve.service.cache_events import CacheEvents, SourceReader, Subscribe
from pdserve.service.grpc_stream import GrpcStream
from pdserve.service.later_version import CountUnknown, Tolerant
from pdserve.service.outbox import DEFAULT_LIMIT
from pdserve.service.peer_proof import RouterGuard, WorkerProof
from pdserve.service.proven_call import open_proven
from pdserve.service.rpc import EOF, open_channel
from pdserve.service.secret import Unauthenticated
from pdserve.session import Session

log = structlog.get_logger()


class WorkersServicer(session_pb2_grpc.WorkersServicer):
    """The router's side of both streams. Each is handed to a callback that runs until it has ended.

    tasks          where the callbacks run: they outlive their calls, so that they always learn the end from `receive`
    count_unknown  told of what a worker of a later version says
    """

    def __init__(
        self,
        *,
        on_session: Callable[[Session[Down, Up]], Awaitable[None]],
        on_cache_events: Callable[[CacheEvents], Awaitable[None]],
        guard: RouterGuard,
        tasks: asyncio.TaskGroup,
        count_unknown: CountUnknown,
        outbox_limit: int = DEFAULT_LIMIT,
    ) -> None:
        self._on_session = on_session
        self._count_unknown = count_unknown
        self._on_cache_events = on_cache_events
        self._guard = guard
        self._tasks = tasks
        self._outbox_limit = outbox_limit

    async def Session(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]  # noqa: N802
        await self._guard.admit(context)
        decode: Tolerant[Up] = Tolerant("session", convert.up_from_proto, self._count_unknown)
        session: GrpcStream[Down, Up] = GrpcStream(
            context.peer(), convert.down_to_proto, decode, self._outbox_limit
        )
        self._tasks.create_task(self._serve(session))
        try:
            await session.run(context.read, context.write)
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
        finally:
            session.close("served")

    async def CacheEvents(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]  # noqa: N802
        await self._guard.admit(context)
        opening = await context.read()
        if opening is EOF:
            return
        worker = convert.cache_opening_from_proto(opening)
        events = _GrpcCacheEvents(context.peer(), worker, self._count_unknown)
        self._tasks.create_task(self._serve_cache_events(events))
        try:
            await events.session.run(context.read, context.write)
        finally:
            events.session.end("connection lost")

    async def _serve_cache_events(self, events: _GrpcCacheEvents) -> None:
        try:
            await self._on_cache_events(events)
        except Exception:  # outermost frame of one stream; the others go on
            log.exception("cache_events.crashed", worker=events.worker.id)
        finally:
            events.session.close("served")


class _GrpcCacheEvents:
    """See CacheEvents; the same reader and writer as a session, with other messages.

    An event that is skipped leaves a gap in the sequence, so the reader asks for a snapshot.
    """

    def __init__(self, peer: str, worker: WorkerRef, count_unknown: CountUnknown) -> None:
        self._worker = worker
        decode: Tolerant[CacheEvent] = Tolerant("cache_events", convert.cache_event_from_proto, count_unknown)
        self.session: GrpcStream[bool, CacheEvent] = GrpcStream(
            peer, lambda snapshot: session_pb2.CacheRequest(snapshot=snapshot), decode
        )

    @property
    def worker(self) -> WorkerRef:
        return self._worker

    async def receive(self) -> CacheEvent:
        return await self.session.receive()

    def ask_snapshot(self) -> None:
        self.session.send(True)


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
        self._random = random
        self._tasks = tasks
        self._outbox_limit = outbox_limit
        self._running: dict[asyncio.Task[None], None] = {}

    async def dial(self, address: str) -> Session[Up, Down]:
        """Open a session. Raises WorkerLost if nobody answers there; Unauthenticated or Incompatible, which an
        operator must see to, if the router refuses."""
        channel = self._open(address)
        try:
            call = await self._call(session_pb2_grpc.WorkersStub(channel).Session, address)
        except BaseException as error:
            await channel.close(None)
            if isinstance(error, PdserveError) and not isinstance(error, Unauthenticated | Incompatible):
                raise _not_opened(error, address) from error
            raise
        decode: Tolerant[Down] = Tolerant("session", convert.down_from_proto, self._count_unknown)
        session: GrpcStream[Up, Down] = GrpcStream(address, convert.up_to_proto, decode, self._outbox_limit)
        task = self._tasks.create_task(_run_dialed(session, call, channel))
        self._running[task] = None
        task.add_done_callback(lambda done: self._running.pop(done, None))
        return session

    async def closed(self) -> None:
        """Return when no session is open any more: what they still had to say has gone out, or never will."""
        if self._running:
            await asyncio.wait(tuple(self._running))

    async def send_cache_events(self, address: str, subscribe: Subscribe) -> None:
        """Tell a router about the prefix cache until the stream ends; then raise as `dial` does."""
        channel = self._open(address)
        source: SourceReader | None = None
        try:
            call = await self._call(session_pb2_grpc.WorkersStub(channel).CacheEvents, address)
            source = SourceReader(subscribe)
            await _tell_changes(call, source, self._worker, address)
        except PdserveError as error:
            raise _not_opened(error, address) from error
        # A connection lives as long as a call on it, and what leaves a TaskGroup (of Python 3.11) is in reference
        # cycles with frames and the task: the call must not wait in one of them for the garbage collector.
        except ExceptionGroup as group:
            _forget_frames(group)
            raise _told(group, address) from None
        except asyncio.CancelledError as cancelled:
            _forget_frames(cancelled)
            raise
        finally:
            if source is not None:
                source.close()
            await channel.close(None)

    def _open(self, address: str) -> grpc.aio.Channel:
        return open_channel(address, keepalive_s=self._keepalive_s, max_message_bytes=self._max_message_bytes)

    async def _call(self, method: Any, address: str) -> Any:
        """A call that the router has let in."""
        proof = WorkerProof(self._worker, self._secret, self._random)
        return await open_proven(lambda metadata: method(metadata=metadata), proof, address, self._connect_s)


async def _run_dialed(session: GrpcStream[Up, Down], call: Any, channel: grpc.aio.Channel) -> None:
    try:
        await session.run(call.read, call.write, call.done_writing)
    except Exception:  # outermost frame of one session; the worker's others go on
        log.exception("session.crashed", peer=session.peer)
    finally:
        session.end("connection lost")
        call.cancel()
        await channel.close(None)


async def _tell_changes(call: Any, source: SourceReader, worker: WorkerRef, address: str) -> None:
    """Until the stream ends."""
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(_answer_snapshots(call, source, address))
        await call.write(convert.cache_opening_to_proto(worker))
        while True:
            await call.write(convert.cache_event_to_proto(await source.next()))


async def _answer_snapshots(call: Any, source: SourceReader, address: str) -> None:
    while True:
        msg = await call.read()
        if msg is EOF:
            raise WorkerLost("the router ended the cache events", peer=address)
        if msg.snapshot:
            source.snapshot()


def _not_opened(error: PdserveError, address: str) -> WorkerLost:
    return WorkerLost("no session with the router", peer=address, reason=str(error))


def _forget_frames(error: BaseException) -> None:
    """Where an error, and all it came from, was raised. (A log would show it; nothing of this is logged with it.)"""
    seen: dict[int, BaseException] = {}
    rest: list[BaseException | None] = [error]
    while rest:
        each = rest.pop()
        if each is not None and id(each) not in seen:
            seen[id(each)] = each
            each.__traceback__ = None
            rest += [each.__cause__, each.__context__]
            if isinstance(each, BaseExceptionGroup):
                rest += each.exceptions


def _told(group: ExceptionGroup[Exception], address: str) -> Exception:
    """One error that says why a stream broke; the group itself if it is none that a stream breaks with."""
    found = primary(group)
    if isinstance(found, asyncio.InvalidStateError):  # written to after the end
        return WorkerLost("the cache events ended", peer=address)
    if isinstance(found, grpc.aio.AioRpcError):
        return WorkerLost("the cache events ended", peer=address, reason=found.details())
    if isinstance(found, PdserveError):
        return WorkerLost("the cache events ended", peer=address, reason=str(found))
    return group
