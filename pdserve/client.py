"""Clients for Python: `AsyncClient`, and `Client` for code without an event loop. No torch, no tokenizer.

    async with AsyncClient(["10.0.0.1:50051", "10.0.0.2:50051"]) as client:
        async for event in client.generate("Once upon a time"):
            ...

If the router is lost in mid-stream the request goes on at the next target: nothing is missing, nothing repeated.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from copy import copy
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdserve.chat import check_chat
from pdserve.clock import Clock, SystemClock
from pdserve.completion import Completion, ResumableGeneration, collect
from pdserve.errors import DeadlineExceeded, Draining, Incompatible, InvalidRequest, Unauthenticated
from pdserve.fields import check_unicode, plain_header
from pdserve.request import (
    Chat,
    Event,
    GenerateRequest,
    Input,
    Limits,
    chat_to_proto,
    event_from_proto,
)
from pdserve.rpc.v1 import inference_pb2 as pb
from pdserve.rpc.v1.inference_pb2_grpc import InferenceStub
from pdserve.service.rpc import INFERENCE
from pdserve.service.rpc_errors import ServerLost, error_of
from pdserve.service.targets import RouterLost as RouterLost
from pdserve.service.targets import Targets
from pdserve.service.tls import ClientTls as ClientTls
from pdserve.shared_calls import AskApart, MultiplexedCalls
from pdserve.status import CLUSTER_STATUS, MODEL_INFO, ClusterStatus, ModelInfo

T = TypeVar("T")
PROBE_S = 2.0  # for an answer to whether a router serves


class AsyncClient:
    """Talks to one router, or to the first of several that answers. One event loop; any number of calls at once.

    targets  HOST:PORT, or several of them
    api_key  if the routers ask for one
    tls      ClientTls(ca=…); None = without
    shares_calls  send many requests over one call where the router knows that: it costs both sides a fraction
    Every method raises errors of pdserve.errors: InvalidRequest, Overloaded, DeadlineExceeded, RouterLost, …
    """

    def __init__(
        self,
        targets: str | Sequence[str],
        *,
        api_key: str = "",
        tls: ClientTls | None = None,
        keepalive_s: float = 1.0,
        clock: Clock | None = None,
        shares_calls: bool = False,
    ) -> None:
        self._targets = Targets(targets, keepalive_s, api_key, tls)
        self._shared = MultiplexedCalls(self._targets.channel) if shares_calls else None
        self._metadata = self._targets.metadata
        self._clock = clock or SystemClock()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End all calls and connections; idempotent."""
        if self._shared is not None:
            await self._shared.close()
        await self._targets.close()

    def with_metadata(self, metadata: Sequence[tuple[str, str]]) -> Self:
        """The same connections, for calls with this metadata: those of whoever stands behind a gateway.

        Raises Unauthenticated for a key that is none, InvalidRequest for anything else that can't be sent.
        """
        for name, value in metadata:
            if not plain_header(value):
                if name == "authorization":
                    raise Unauthenticated("no valid API key")
                raise InvalidRequest("metadata of a call is printable ASCII", name=name)
        client = copy(self)
        client._metadata = tuple(metadata)
        return client

    async def generate(
        self, request: GenerateRequest | Input, *, deadline_s: float | None = None
    ) -> AsyncGenerator[Event, None]:
        """Started, then Tokens as they are made, then one Finished for each choice.

        request     text, a Chat, token ids, or a GenerateRequest with everything there is to say
        deadline_s  seconds from now for the whole of it, moves to other routers included
        Leaving the iteration cancels the request.
        """
        asked = request if isinstance(request, GenerateRequest) else GenerateRequest(input=request)
        asked.check(Limits())  # the rest is the router's to know
        generation = ResumableGeneration(asked)
        ends_at_s = None if deadline_s is None else self._clock.now_s() + deadline_s
        num_silent = 0  # targets in a row that said nothing
        while True:
            target = self._targets.current
            try:
                async with aclosing(self._stream(target, generation.next_request(), ends_at_s)) as events:
                    async for event in events:
                        num_silent = 0
                        for fresh in generation.take(event):
                            yield fresh
                generation.check_whole()
                return
            except (ServerLost, Draining) as error:
                if generation.finished:
                    return
                num_silent += 1
                self._targets.leave(target)
                # A single name may stand for several routers, so it is asked once more.
                if num_silent >= max(2, len(self._targets)):
                    raise _lost(error, generation) from error

    async def generate_text(
        self, request: GenerateRequest | Input, *, deadline_s: float | None = None
    ) -> Completion:
        """As `generate`, collected."""
        async with aclosing(self.generate(request, deadline_s=deadline_s)) as events:
            return await collect(events)

    async def abort(self, request_id: str) -> None:
        """End a running request. Raises UnknownRequest."""
        await self._unary("Abort", pb.AbortRequest(request_id=request_id))

    async def tokenize(self, text: str | Chat) -> tuple[int, ...]:
        """The ids that `generate` would compute for it; a Chat through the model's template."""
        if isinstance(text, str):
            check_unicode("text", text)
            asked = pb.TokenizeRequest(text=text)
        else:
            check_chat(text)
            asked = pb.TokenizeRequest(chat=chat_to_proto(text))
        return tuple((await self._unary("Tokenize", asked)).token_ids)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """The text of ids."""
        return str((await self._unary("Detokenize", pb.DetokenizeRequest(token_ids=token_ids))).text)

    async def token_bytes(self, token_ids: Sequence[int]) -> tuple[bytes, ...]:
        """How each of these tokens is written by itself. Raises Incompatible if the router is an earlier one."""
        asked = pb.DetokenizeRequest(token_ids=token_ids, each=True)
        written = tuple((await self._unary("Detokenize", asked)).tokens)
        if len(written) != len(token_ids):
            raise Incompatible(
                "the router doesn't tell how single tokens are written: it is an earlier version"
            )
        return written

    async def serving(self) -> bool:
        """Whether a request would be served now; asked without an API key."""
        asked = health_pb2.HealthCheckRequest(service=INFERENCE)
        answer = await self._targets.ask(
            lambda target: health_pb2_grpc.HealthStub(self._targets.channel(target)).Check(
                asked, timeout=PROBE_S
            )
        )
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    async def model(self) -> ModelInfo:
        """The model that is served."""
        return MODEL_INFO.read(await self._unary("GetModel", pb.GetModelRequest()))

    async def status(self, *, explain: bool = False) -> ClusterStatus:
        """Workers, pairs and queue as this router sees them; explain: also why requests went where they went."""
        return CLUSTER_STATUS.read(await self._unary("GetStatus", pb.GetStatusRequest(explain=explain)))

    async def _stream(
        self, target: str, request: GenerateRequest, ends_at_s: float | None
    ) -> AsyncGenerator[Event, None]:
        timeout_s = None if ends_at_s is None else ends_at_s - self._clock.now_s()
        if timeout_s is not None and timeout_s <= 0:
            raise DeadlineExceeded("the deadline has passed", target=target)
        message = request.to_proto()
        if self._shared is not None:
            with contextlib.suppress(AskApart):
                stream = self._shared.begin(target, message, self._metadata, timeout_s)
                try:
                    async for event in stream:
                        yield event
                finally:
                    stream.close()
                return
        call = self._stub(target).Generate(message, timeout=timeout_s, metadata=self._metadata)
        try:
            async for msg in call:
                if (known := event_from_proto(msg)) is not None:
                    yield known
        except grpc.aio.AioRpcError as error:
            raise error_of(error, target) from None
        finally:
            call.cancel()

    async def _unary(self, method: str, message: Any) -> Any:
        """A call that may be asked of any router."""
        metadata = self._metadata
        return await self._targets.ask(
            lambda target: getattr(self._stub(target), method)(message, metadata=metadata)
        )

    def _stub(self, target: str) -> Any:
        return InferenceStub(self._targets.channel(target))


class Client:
    """The same for code without an event loop. Any thread may call; the calls run on a loop of the client's own."""

    def __init__(
        self,
        targets: str | Sequence[str],
        *,
        api_key: str = "",
        tls: ClientTls | None = None,
        keepalive_s: float = 1.0,
    ) -> None:
        self._client = AsyncClient(targets, api_key=api_key, tls=tls, keepalive_s=keepalive_s)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="pdserve-client", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all calls and the client's thread; idempotent."""
        if self._thread.is_alive():
            self._run(self._client.close())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def generate(
        self, request: GenerateRequest | Input, *, deadline_s: float | None = None
    ) -> Iterator[Event]:
        """See AsyncClient.generate."""
        events = self._client.generate(request, deadline_s=deadline_s)
        try:
            while (event := self._run(_next(events))) is not None:
                yield event
        finally:
            self._run(events.aclose())

    def generate_text(
        self, request: GenerateRequest | Input, *, deadline_s: float | None = None
    ) -> Completion:
        """See AsyncClient.generate_text."""
        return self._run(self._client.generate_text(request, deadline_s=deadline_s))

    def abort(self, request_id: str) -> None:
        """See AsyncClient.abort."""
        self._run(self._client.abort(request_id))

    def tokenize(self, text: str | Chat) -> tuple[int, ...]:
        """See AsyncClient.tokenize."""
        return self._run(self._client.tokenize(text))

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """See AsyncClient.detokenize."""
        return self._run(self._client.detokenize(token_ids))

    def model(self) -> ModelInfo:
        """See AsyncClient.model."""
        return self._run(self._client.model())

    def status(self, *, explain: bool = False) -> ClusterStatus:
        """See AsyncClient.status."""
        return self._run(self._client.status(explain=explain))

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        future: Future[T] = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:  # Ctrl-C in this thread: the call must not go on in the other
            future.cancel()
            raise


async def _next(events: AsyncGenerator[Event, None]) -> Event | None:
    return await anext(events, None)


def _lost(error: ServerLost | Draining, generation: ResumableGeneration) -> RouterLost | Draining:
    if isinstance(error, Draining):
        return error
    lost = RouterLost(error.message, **error.fields)
    lost.resume = generation.resume()
    return lost
