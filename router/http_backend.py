"""The router's own app behind its HTTP door: no hop, and the same doorkeepers as for gRPC."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from typing import TypeVar

from prometheus_client.exposition import generate_latest

from http_door.port import Call, Purpose, Visit
from pdserve.errors import PdserveError, PermissionDenied
from pdserve.request import Chat, Event, GenerateRequest
from pdserve.status import ClusterStatus, ModelInfo
from router.admission import Place
from router.app import RouterApp
from router.callers import Caller
from router.gate import Gate
from router.summary import large_ones_counted
from router.traceparent import traceparent_of

T = TypeVar("T")


class RouterHttpBackend:
    """See Backend. gate: where calls get their places. not_ready: as the process says it."""

    def __init__(self, app: RouterApp, gate: Gate, not_ready: Callable[[], Sequence[str]]) -> None:
        self._app = app
        self._gate = gate
        self._not_ready = not_ready

    @contextlib.contextmanager
    def visit(self, call: Call) -> Iterator[Visit]:
        with contextlib.ExitStack() as stack:
            place = None
            try:
                caller = self._app.callers.admit(call.metadata)
                if call.purpose is Purpose.TEXT:
                    caller.limits.take_call()
            except PdserveError as error:
                is_request = call.purpose is Purpose.GENERATE
                self._app.metrics.count_call_refused(error, is_request=is_request)
                raise
            if call.purpose is Purpose.GENERATE:
                place = self._gate.enter(caller, stack)
            elif call.purpose is Purpose.TEXT:
                place = self._gate.arrive(is_request=False)
                stack.callback(place.give_back)
            yield _RouterVisit(self._app, self._gate, call, caller, place, stack)

    def not_ready(self) -> Sequence[str]:
        if reasons := self._not_ready():
            return reasons
        return () if self._app.serving else ("no worker takes requests yet",)

    def metrics(self, call: Call) -> bytes:
        if not self._app.callers.admit(call.metadata).sees_all:
            raise PermissionDenied("the metrics tell of all tenants: this API key is no admin's")
        return generate_latest(self._app.metrics.registry)


class _RouterVisit:
    """place: of the call's first request; more requests of one call take places of their own."""

    def __init__(
        self,
        app: RouterApp,
        gate: Gate,
        call: Call,
        caller: Caller,
        place: Place | None,
        ends: contextlib.ExitStack,
    ) -> None:
        self._app = app
        self._gate = gate
        self._call = call
        self._caller = caller
        self._place = place
        self._ends = ends
        self._traceparent = traceparent_of(call.metadata)
        self.asker = caller.tenant or call.peer

    async def read(self, work: Callable[[], T], num_bytes: int) -> T:
        try:
            return await self._app.turns.call(work, user=self.asker, num_bytes=num_bytes)
        except PdserveError as error:
            self._app.on_unread(error)
            if self._call.purpose is Purpose.GENERATE:
                self._app.metrics.requests.labels(status=error.code.value).inc()
            raise

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        generation = self._app.generate(
            request,
            caller=self._caller,
            place=self._take_place(),
            asker=self._caller.tenant or request.user or self.asker,
            traceparent=self._traceparent,
        )
        try:
            async for event in generation:
                yield event
        finally:
            generation.close()

    def _take_place(self) -> Place:
        place, self._place = self._place, None
        return place or self._gate.enter(self._caller, self._ends)

    async def tokenize(self, source: str | Chat) -> tuple[int, ...]:
        with large_ones_counted(self._app.metrics):
            return await self._app.tokenize(source, self.asker)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        with large_ones_counted(self._app.metrics):
            return await self._app.detokenize(token_ids, self.asker)

    async def token_bytes(self, token_ids: Sequence[int]) -> Sequence[bytes]:
        return await self._app.token_bytes(token_ids, self.asker)

    async def model(self) -> ModelInfo:
        return await self._app.model()

    async def status(self, *, explain: bool = False) -> ClusterStatus:
        return self._app.status(explain=explain, caller=self._caller)
