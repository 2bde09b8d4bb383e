"""The first that happens to a call: it gets a place, or the answer that none is free, before its message is read."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import structlog

from pdserve.clock import Clock
from pdserve.errors import Code, PdserveError
from pdserve.service.rpc import INFERENCE, VLLM_ENGINE
from router.admission import Admission, Place
from router.callers import Caller
from router.metrics import RouterMetrics

log = structlog.get_logger()

GENERATE = f"/{INFERENCE}/Generate"
GENERATE_MANY = f"/{INFERENCE}/GenerateMany"  # whose requests take places one by one
GENERATES = (GENERATE, f"/{VLLM_ENGINE}/Generate")
TAKE_PLACES = (*GENERATES, f"/{INFERENCE}/Tokenize", f"/{INFERENCE}/Detokenize")
TELL_EVERY_S = 1.0

if TYPE_CHECKING:  # generic in the stubs only
    _Interceptor = grpc.aio.ServerInterceptor[Any, Any]
else:
    _Interceptor = grpc.aio.ServerInterceptor


class Gate(_Interceptor):
    """Event-loop thread only. A call's place is given back at the end of its task, if nobody did before."""

    def __init__(self, admission: Admission, metrics: RouterMetrics, clock: Clock) -> None:
        self._admission = admission
        self._metrics = metrics
        self._clock = clock
        self._unread: dict[asyncio.Task[Any], Place] = {}
        self._num_refused = 0
        self._told_s = -TELL_EVERY_S

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if method not in TAKE_PLACES:
            return handler
        try:
            place = self.arrive(is_request=method in GENERATES)
        except PdserveError as error:
            return refusal(error)
        task = asyncio.current_task()
        assert task is not None, "a server's calls run in tasks"
        task.add_done_callback(lambda _: place.give_back())
        return self._counted(handler, task, place) if method in GENERATES else handler

    def arrive(self, *, is_request: bool) -> Place:
        """A place for a call; its refusal is counted and told. Raises Overloaded, Draining."""
        try:
            return self._admission.arrive()
        except PdserveError as error:
            self._refused(error, is_request=is_request)
            raise

    def enter(self, caller: Caller, ends: contextlib.ExitStack) -> Place:
        """A place for a request that has no call of its own, and its share of its key's limits, until `ends`.

        Raises as `arrive`, and what its key's limits say.
        """
        try:
            caller.limits.begin()
        except PdserveError as error:
            self._metrics.count_call_refused(error, is_request=True)
            raise
        ends.callback(caller.limits.end)
        place = self.arrive(is_request=True)
        ends.callback(place.give_back)
        return place

    def take_place(self) -> Place:
        """Of the request that the current task serves. Once a request."""
        task = asyncio.current_task()
        assert task is not None, "called by a servicer"
        return self._unread.pop(task)

    def _counted(self, handler: Any, task: asyncio.Task[Any], place: Place) -> Any:
        """The same, with the requests counted that end before they are any: nothing came, or nothing legible."""
        self._unread[task] = place
        task.add_done_callback(self._ended)
        read = handler.stream_stream  # of a RequestReader

        async def behaviour(requests: Any, context: Any) -> None:
            try:
                await read(requests, context)
            except PdserveError as error:
                if self._unread.pop(task, None) is not None:
                    self._count(error.code)
                raise

        return grpc.stream_stream_rpc_method_handler(behaviour, None, handler.response_serializer)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        if self._unread.pop(task, None) is not None:
            self._count(Code.CANCELLED)

    def _count(self, code: Code) -> None:
        self._metrics.requests.labels(status=code.value).inc()

    def _refused(self, error: PdserveError, *, is_request: bool) -> None:
        """Count each; log the first of a crowd, and then their number once a second."""
        if is_request:
            self._count(error.code)
        self._num_refused += 1
        now_s = self._clock.now_s()
        if now_s - self._told_s >= TELL_EVERY_S:
            log.warning(
                "calls.refused", num_calls=self._num_refused, status=error.code.value, error=str(error)
            )
            self._told_s, self._num_refused = now_s, 0


def refusal(error: PdserveError) -> Any:
    """A handler that ends a call so, whatever kind of call it is."""

    async def refuse(requests: Any, context: Any) -> None:
        raise error

    return grpc.stream_stream_rpc_method_handler(refuse)  # which, unlike the call's own kind, reads nothing
