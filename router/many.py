"""Calls with many requests: what one turn of the loop brings to all of them goes into one message.

A message over gRPC costs ten times what is in it, one token. Each request is served as if it had a call of its own: the
same key, place, limits and turn; its own deadline, and its own end. A client takes so many responses of a request as it
has room for, and says when it has read some: what it leaves lying waits in that request's output, as long as a client
of a call of its own may stand still, and nobody else waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import structlog

from pdserve.clock import Clock
from pdserve.errors import (
    InvalidRequest,
    InvariantViolated,
    Overloaded,
    PdserveError,
    RequestCancelled,
    too_large,
)
from pdserve.request import event_to_proto
from pdserve.rpc.v1 import inference_pb2 as pb
from pdserve.service.stream_end import stream_end
from router.app import RouterApp
from router.caller_interceptor import asker_of_call
from router.conductor import Conductor
from router.gate import Gate
from router.progress_timer import ProgressTimer
from router.summary import refusals_told
from router.traceparent import traceparent_of
from router.validation import read_message

ROOM = 32
"""Responses of a request that may be under way at first; so many more as its client says it has read."""
IDLE_S = 60.0  # longer than a client of ours keeps one
MOST_ITEMS, MOST_STREAMS = 256, 4_096  # of a message, and of a call at a time: what holds up the loop
_MESSAGE_BYTES = 256 * 1024  # a message is sent when it has so many, and perhaps one response more

log = structlog.get_logger()


class ManyCalls:
    """All such calls of a router. Event-loop thread only.

    most    at a time: any more are refused, and their clients ask call by call
    idle_s  after so long without a request a call ends
    """

    def __init__(self, app: RouterApp, gate: Gate, clock: Clock, most: int, idle_s: float = IDLE_S) -> None:
        self._app = app
        self._gate = gate
        self._clock = clock
        self._most = most
        self._idle_s = idle_s
        self._calls: set[_ManyCall] = set()

    async def serve(self, requests: AsyncIterator[pb.ManyRequests], context: Any) -> None:
        """One call, in its own task, until its client has ended it and all requests have ended. Raises Overloaded;
        InvalidRequest for what breaks a rule of the call."""
        if len(self._calls) >= self._most:
            raise Overloaded("too many calls with many requests", limit=self._most)
        call = _ManyCall(self._app, self._gate, self._clock, context, self._idle_s)
        self._calls.add(call)
        self._app.metrics.shared_calls.set(len(self._calls))
        try:
            await call.run(requests)
        finally:
            self._calls.remove(call)
            self._app.metrics.shared_calls.set(len(self._calls))

    def close(self) -> None:
        """End those that have no request; those that still have one, behind it."""
        for call in self._calls:
            call.close()


class _Stream:
    """One request of a call."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.room = ROOM
        self.generation: Conductor | None = None
        self.error: PdserveError | None = None
        self.is_over = False  # whether the end is to be told, or has been
        self.ended = asyncio.Event()

    def end(self, error: PdserveError | None) -> None:
        """What the client is told; the first one stays."""
        if not self.is_over:
            self.is_over, self.error = True, error

    @property
    def ready(self) -> bool:
        """Whether there is something to write."""
        return self.is_over or (self.room > 0 and self.generation is not None and self.generation.ready)

    def take(self) -> pb.OneResponse | None:
        """The next thing to write, while it is ready; None when there is nothing behind the last one but the end."""
        if not self.is_over:
            assert self.generation is not None
            try:
                event = self.generation.take_now()
            except PdserveError as error:
                self.end(error)
            else:
                if event is not None:
                    self.room -= 1
                    return pb.OneResponse(stream=self.number, response=event_to_proto(event))
                self.end(None)
        return None


class _ManyCall:
    def __init__(self, app: RouterApp, gate: Gate, clock: Clock, context: Any, idle_s: float) -> None:
        self._idle_s = idle_s
        self._app = app
        self._gate = gate
        self._context = context
        self._metadata = context.invocation_metadata()
        self._streams: dict[int, _Stream] = {}
        self._highest = 0
        self._ready: dict[_Stream, None] = {}  # as a set, in order
        self._work = asyncio.Event()
        self._closing = False
        self._idle = ProgressTimer(clock, self.close)

    def close(self) -> None:
        """End when no request is left."""
        self._closing = True
        self._work.set()

    async def run(self, requests: AsyncIterator[pb.ManyRequests]) -> None:
        self._idle.restart(self._idle_s)
        try:
            async with asyncio.TaskGroup() as tasks:
                reader = tasks.create_task(self._read(requests, tasks))
                await self._write()
                reader.cancel()
        except* PdserveError as group:  # of the reader: a rule was broken
            raise group.exceptions[0] from None
        finally:
            self._idle.stop()

    async def _read(self, requests: AsyncIterator[pb.ManyRequests], tasks: asyncio.TaskGroup) -> None:
        async for message in requests:
            if (num_items := len(message.items)) > MOST_ITEMS:
                raise too_large(
                    "items", "a message has too many of its items", limit=MOST_ITEMS, value=num_items
                )
            for item in message.items:
                self._take(item, tasks)
        self.close()

    def _take(self, item: pb.OneRequest, tasks: asyncio.TaskGroup) -> None:
        what = item.WhichOneof("what")
        if what == "begin":
            if item.stream <= self._highest:
                raise InvalidRequest("streams of a call have rising numbers", stream=item.stream)
            if len(self._streams) >= MOST_STREAMS:
                raise Overloaded("too many requests of a call at a time", limit=MOST_STREAMS)
            self._highest = item.stream
            stream = self._streams[item.stream] = _Stream(item.stream)
            self._idle.pause()
            tasks.create_task(self._serve(stream, item))
        elif (known := self._streams.get(item.stream)) is None:
            return  # it has ended meanwhile
        elif what == "taken":
            known.room = min(known.room + item.taken, ROOM)
            self._look(known)
        elif what == "cancel":
            known.end(RequestCancelled("the client went away"))
            self._look(known)

    async def _serve(self, stream: _Stream, item: pb.OneRequest) -> None:
        """One request, from its arrival to its end. In a task of its own."""
        try:
            await self._generate(stream, item)
        except PdserveError as error:
            stream.end(error)
        except Exception as bug:  # the outermost frame of a request: the others go on
            log.error("request.crashed", request_id="", exc_info=bug)
            stream.end(InvariantViolated("internal error of the router"))
        self._look(stream)
        await stream.ended.wait()

    async def _generate(self, stream: _Stream, item: pb.OneRequest) -> None:
        request, app = item.begin, self._app
        with contextlib.ExitStack() as ends:
            try:
                caller = app.callers.admit(
                    self._metadata
                )  # the key may have been revoked since the call began
            except PdserveError as error:
                app.metrics.count_call_refused(error, is_request=True)
                raise
            place = self._gate.enter(caller, ends)
            asker = asker_of_call(self._context, request.user)
            with refusals_told(request.request_id, app.metrics):
                asked = await app.read(
                    lambda limits: read_message(request, limits), asker, request.ByteSize()
                )
            if stream.is_over:
                return  # cancelled meanwhile
            generation = stream.generation = app.begin(
                asked,
                caller=caller,
                place=place,
                asker=asker,
                deadline_left_s=item.timeout_ms / 1000 if item.timeout_ms else None,
                traceparent=traceparent_of([("traceparent", item.traceparent)] if item.traceparent else None),
            )
            generation.on_stalled = lambda: self._stalled(stream)
            generation.follow(lambda: self._look(stream))
            try:
                await stream.ended.wait()
            finally:
                generation.close()

    def _stalled(self, stream: _Stream) -> None:
        stream.end(RequestCancelled("the client doesn't read its stream"))
        self._look(stream)

    def _look(self, stream: _Stream) -> None:
        if stream.ready and not stream.ended.is_set():
            self._ready[stream] = None
            self._work.set()

    async def _write(self) -> None:
        """Until the call is closed and no request is left."""
        while not (self._closing and not self._streams):
            await self._work.wait()
            self._work.clear()
            while items := self._gathered():
                await self._context.write(pb.ManyResponses(items=items))

    def _gathered(self) -> list[pb.OneResponse]:
        """What is ready, and so much that a message is not too large; what is left comes first in the next one."""
        items: list[pb.OneResponse] = []
        num_bytes = 0
        while self._ready and num_bytes < _MESSAGE_BYTES:
            stream = next(iter(self._ready))
            response = stream.take()
            if response is not None:
                items.append(response)
                num_bytes += response.ByteSize()
            if not stream.ready:
                del self._ready[stream]
            elif stream.is_over:
                del self._ready[stream]
                items.append(pb.OneResponse(stream=stream.number, end=stream_end(stream.error)))
                self._forget(stream)
        return items

    def _forget(self, stream: _Stream) -> None:
        del self._streams[stream.number]
        stream.ended.set()
        if not self._streams:
            self._idle.restart(self._idle_s)
