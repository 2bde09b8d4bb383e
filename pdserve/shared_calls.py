"""Many requests of a client over one call of a router, GenerateMany: a message brings what a moment gives all of them.

A router that doesn't know that call, or has too many of them, is asked call by call.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from copy import copy
from typing import Any, Self

import grpc.aio
import structlog

from pdserve.errors import DeadlineExceeded, Incompatible, Overloaded, PdserveError
from pdserve.request import Event, event_from_proto
from pdserve.rpc.v1 import inference_pb2 as pb
from pdserve.rpc.v1.inference_pb2_grpc import InferenceStub
from pdserve.service.rpc_errors import ServerLost, error_of
from pdserve.service.stream_end import error_of_end

_TRACE = ("traceparent", "tracestate")
_MOST_BYTES = 1 << 20  # a larger request has a call of its own: others would wait behind it
_MOST_ITEMS = 256  # of a message: a router takes no more
_TELL_AFTER = 8  # responses read of a stream, of the router's room for 32
IDLE_S = 10.0
APART_S = 60.0  # so long a router that refused a call isn't asked for one again

Metadata = tuple[tuple[str, str], ...]

log = structlog.get_logger()


class AskApart(Exception):
    """This router doesn't take the request over a shared call; nothing has been computed for it."""


class MultiplexedCalls:
    """Those of one client, one for each router and key. One event loop.

    idle_s  how long a call is kept without requests
    """

    def __init__(self, channel: Callable[[str], grpc.aio.Channel], idle_s: float = IDLE_S) -> None:
        self._channel = channel
        self._idle_s = idle_s
        self._calls: dict[tuple[str, Metadata], _SharedCall] = {}
        self._apart: dict[str, float] = {}  # by router: until when it is asked call by call

    def begin(
        self, target: str, request: pb.GenerateRequest, metadata: Metadata, timeout_s: float | None
    ) -> SharedStream:
        """Ask for one more. Iterating raises what a call of its own would, and AskApart before the first event, as
        this does. To be closed."""
        now_s = asyncio.get_running_loop().time()
        if request.ByteSize() > _MOST_BYTES or self._apart.get(target, 0.0) > now_s:
            raise AskApart
        own = tuple(pair for pair in metadata if pair[0] not in _TRACE)
        call = self._calls.get((target, own))
        if call is None or call.is_over:
            call = _SharedCall(InferenceStub(self._channel(target)), own, target, self._idle_s)
            self._calls[target, own] = call
            call.on_over = lambda: self._forget(target, own, call)
        return call.begin(request, dict(metadata).get("traceparent", ""), timeout_s)

    def _forget(self, target: str, own: Metadata, call: _SharedCall) -> None:
        if self._calls.get((target, own)) is call:
            del self._calls[target, own]
        if call.refused is not None and self._apart.get(target, 0.0) <= asyncio.get_running_loop().time():
            self._apart[target] = asyncio.get_running_loop().time() + APART_S
            log.info("client.asks_call_by_call", router=target, reason=str(call.refused))

    async def close(self) -> None:
        """End them all; idempotent."""
        calls, self._calls = tuple(self._calls.values()), {}
        for call in calls:
            await call.close()


class SharedStream:
    """Events of one request of a call, for one reader. What isn't read yet is at most what the router has room for."""

    def __init__(self, number: int, call: _SharedCall) -> None:
        self.number = number
        self.is_over = False
        self._call = call
        self._num_read = 0
        self._responses: deque[pb.GenerateResponse] = deque()
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        while True:
            while self._responses:
                event = event_from_proto(self._responses.popleft())
                self._num_read += 1
                if self._num_read >= _TELL_AFTER and not self.is_over:
                    self._call.tell_read(self.number, self._num_read)
                    self._num_read = 0
                if event is not None:
                    return event
            if self.is_over:
                if self._error is not None:
                    raise self._error
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    def close(self) -> None:
        """Nobody reads any longer; idempotent."""
        if self._timer is not None:
            self._timer.cancel()
        self._call.leave(self)

    def limit(self, timeout_s: float, late: PdserveError) -> None:
        """Fail so after so many seconds, whatever has come."""
        self._timer = asyncio.get_running_loop().call_later(timeout_s, self._expire, late)

    def put(self, response: pb.GenerateResponse) -> None:
        """One more has come."""
        self._responses.append(response)
        self._wake()

    def end(self, error: Exception | None) -> None:
        """After what has come. error: None = well; the first end stays."""
        if not self.is_over:
            self.is_over, self._error = True, error
            self._wake()

    def _expire(self, late: PdserveError) -> None:
        if not self.is_over:
            self._responses.clear()
            self.end(late)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class _SharedCall:
    """on_over is called once, when no request can be begun any longer; `refused` says why if the router takes none."""

    def __init__(self, stub: Any, metadata: Metadata, target: str, idle_s: float) -> None:
        self._target = target
        self._idle_s = idle_s
        self._call = stub.GenerateMany(metadata=metadata)
        self._streams: dict[int, SharedStream] = {}
        self._last = 0
        self._out: list[pb.OneRequest] = []
        self._work = asyncio.Event()
        self._has_heard = self._asks_apart = False
        self._idle: asyncio.TimerHandle | None = None
        self.is_over = False
        self.refused: PdserveError | None = None
        self.on_over: Callable[[], None] = lambda: None
        loop = asyncio.get_running_loop()
        self._tasks = (loop.create_task(self._read()), loop.create_task(self._write()))

    def begin(self, request: pb.GenerateRequest, traceparent: str, timeout_s: float | None) -> SharedStream:
        """Ask for one more."""
        self._last += 1
        stream = self._streams[self._last] = SharedStream(self._last, self)
        timeout_ms = 0
        if timeout_s is not None:
            timeout_ms = max(1, round(timeout_s * 1000))
            stream.limit(timeout_s, DeadlineExceeded("the deadline has passed", target=self._target))
        self._send(
            pb.OneRequest(stream=self._last, begin=request, traceparent=traceparent, timeout_ms=timeout_ms)
        )
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None
        return stream

    def leave(self, stream: SharedStream) -> None:
        """Nobody reads it any longer."""
        if self._streams.pop(stream.number, None) is not None and not self.is_over:
            self._send(pb.OneRequest(stream=stream.number, cancel=True))
            self._rest()

    async def close(self) -> None:
        """End it and all its requests."""
        self._over(ServerLost("the client was closed", target=self._target))
        self._call.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def tell_read(self, number: int, num_responses: int) -> None:
        """There is room for so many more."""
        self._send(pb.OneRequest(stream=number, taken=num_responses))

    def _send(self, item: pb.OneRequest) -> None:
        self._out.append(item)
        self._work.set()

    def _rest(self) -> None:
        """Without requests, end after a while."""
        if not self._streams and self._idle is None:
            self._idle = asyncio.get_running_loop().call_later(self._idle_s, self._end_idle)

    def _end_idle(self) -> None:
        self._over(ServerLost("the call was ended", target=self._target))  # it has no streams
        self._work.set()

    async def _write(self) -> None:
        """Until the call is over. Its end is the reader's to tell."""
        try:
            while not self.is_over:
                await self._work.wait()
                self._work.clear()
                while self._out:
                    items, self._out = self._out[:_MOST_ITEMS], self._out[_MOST_ITEMS:]
                    await self._call.write(pb.ManyRequests(items=items))
            await self._call.done_writing()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return  # broken, or ended by the router

    async def _read(self) -> None:
        try:
            async for message in self._call:
                self._has_heard = True
                for item in message.items:
                    self._take(item)
            self._over(ServerLost("the router ended the call", target=self._target))
        except grpc.aio.AioRpcError as broken:
            error = error_of(broken, self._target)
            if not self._has_heard and isinstance(error, (Incompatible, Overloaded)):
                self.refused = error
            # A write that meets the end of its call makes gRPC forget what the router said: a call of its own tells.
            self._asks_apart = not self._has_heard and (
                self.refused is not None or isinstance(error, ServerLost)
            )
            self._over(error)

    def _take(self, item: pb.OneResponse) -> None:
        stream = self._streams.get(item.stream)
        if stream is None:
            return  # nobody reads it any longer
        if item.HasField("end"):
            del self._streams[item.stream]
            stream.end(error_of_end(item.end))
            self._rest()
        elif item.HasField("response"):
            stream.put(item.response)

    def _over(self, error: PdserveError) -> None:
        if self.is_over:
            return
        self.is_over = True
        if self._idle is not None:
            self._idle.cancel()
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.end(AskApart() if self._asks_apart else copy(error))
        self._work.set()
        self.on_over()
