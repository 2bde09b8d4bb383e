"""A public server for tests: real gRPC on loopback, its answers given by a function."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import grpc.aio

from pdserve.request import (
    Event,
    Finished,
    GenerateRequest,
    Limits,
    Started,
    Timings,
    Tokens,
    Usage,
    event_to_proto,
)
from pdserve.rpc.v1 import inference_pb2 as pb
from pdserve.rpc.v1 import inference_pb2_grpc
from pdserve.sampling import FinishReason
from pdserve.service.rpc import INFERENCE, Health, add_reflection, bind, make_server

Answer = Callable[[GenerateRequest], AsyncGenerator[Event, None]]


class Door(inference_pb2_grpc.InferenceServicer):
    """Generate streams what `answer` yields; Abort raises what it is told to; the rest echoes."""

    def __init__(self, answer: Answer, abort_error: Exception | None = None) -> None:
        self._answer = answer
        self._abort_error = abort_error
        self.requests: list[GenerateRequest] = []
        self.num_shared_calls = 0
        self.times_remaining: list[float | None] = []
        self.cancelled = asyncio.Event()

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        asked = GenerateRequest.from_proto(request, Limits())
        self.requests.append(asked)
        self.times_remaining.append(context.time_remaining())
        call = asyncio.current_task()
        try:
            async with aclosing(self._answer(asked)) as events:
                async for event in events:
                    yield event_to_proto(event)
        except (asyncio.CancelledError, GeneratorExit):  # while it waited, or while an event was written
            assert asyncio.current_task() is call, "the call ends what it began"
            self.cancelled.set()
            raise

    async def GenerateMany(self, requests: Any, context: Any) -> None:  # type: ignore[override]  # noqa: N802
        """An earlier router's answer."""
        self.num_shared_calls += 1
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")

    async def Abort(self, request: Any, context: Any) -> Any:  # noqa: N802
        if self._abort_error is not None:
            raise self._abort_error
        return pb.AbortResponse()

    async def Tokenize(self, request: Any, context: Any) -> Any:  # noqa: N802
        text = request.text or request.chat.messages[0].content
        return pb.TokenizeResponse(token_ids=text.encode())

    async def Detokenize(self, request: Any, context: Any) -> Any:  # noqa: N802
        if request.each:
            return pb.DetokenizeResponse(tokens=[bytes((each,)) for each in request.token_ids])
        return pb.DetokenizeResponse(text=bytes(request.token_ids).decode())

    async def GetModel(self, request: Any, context: Any) -> Any:  # noqa: N802
        return pb.GetModelResponse(model="m", window_tokens=128, vocab_size=256, eos_token_ids=[0])

    async def GetStatus(self, request: Any, context: Any) -> Any:  # noqa: N802
        blocks = pb.BlockCounts(free=1, granted=2, owned=3, cached=4, quarantined=5)
        worker = pb.WorkerStatus(id="p0", role="prefill", state="up", blocks=blocks)
        pair = pb.PairStatus(prefill_worker="p0", decode_worker="d0", up=True, transport="stream")
        return pb.GetStatusResponse(
            router_id="r0", workers=[worker], pairs=[pair], queue=pb.QueueStatus(num_running=1, limit=9)
        )


@asynccontextmanager
async def open_door(door: Door, address: str = "127.0.0.1:0") -> AsyncIterator[tuple[str, grpc.aio.Server]]:
    """Serve until left; yields address and server."""
    server = make_server(keepalive_s=0.5, max_message_bytes=1 << 20, random=random.Random(1))
    inference_pb2_grpc.add_InferenceServicer_to_server(door, server)
    health = Health(server)
    add_reflection(server, [INFERENCE])
    bound = bind(server, address)
    await server.start()
    await health.serving(INFERENCE)
    try:
        yield bound, server
    finally:
        await server.stop(None)


def started(request: GenerateRequest, seed: int = 77) -> Started:
    """The first event."""
    return Started(
        request_id=request.request_id or "drawn",
        seed=seed,
        num_prompt_tokens=1,
        num_cached_tokens=0,
        prompt_token_ids=(5,),
        model="m",
    )


def token(index: int, choice: int = 0) -> Tokens:
    """The token of an index: its text tells which it is."""
    return Tokens(choice=choice, first_index=index, token_ids=(index,), text=f"{index} ")


def finished(num_tokens: int, choice: int = 0) -> Finished:
    """The last event of a choice."""
    usage = Usage(num_prompt_tokens=1, num_cached_tokens=0, num_completion_tokens=num_tokens)
    return Finished(choice=choice, reason=FinishReason.LENGTH, usage=usage, timings=Timings(), num_attempts=1)


async def count_to(request: GenerateRequest, num_tokens: int = 6) -> AsyncGenerator[Event, None]:
    """A whole generation; a resumed one goes on where the client is."""
    yield started(request)
    held = len(request.resume.choices[0].token_ids) if request.resume is not None else 0
    for index in range(held, num_tokens):
        yield token(index)
    yield finished(num_tokens)
