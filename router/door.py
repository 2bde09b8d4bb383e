"""The public gRPC service: protobuf outside, our dataclasses inside. Errors are mapped by the server's interceptor."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from pdserve.errors import InvalidRequest, RequestCancelled
from pdserve.request import Chat, chat_from_proto, event_to_proto
from pdserve.rpc.v1 import inference_pb2 as pb
from pdserve.rpc.v1 import inference_pb2_grpc
from pdserve.status import CLUSTER_STATUS, MODEL_INFO
from router.app import RouterApp
from router.caller_interceptor import asker_of_call, caller_of_call
from router.gate import Gate
from router.summary import large_ones_counted, refusals_told
from router.traceparent import traceparent_of

_IDS_AT_ONCE = 65_536  # which hold the interpreter for a millisecond


class InferenceServicer(inference_pb2_grpc.InferenceServicer):
    """Event-loop thread only. gate: where each call has got its place."""

    def __init__(self, app: RouterApp, gate: Gate) -> None:
        self._app = app
        self._gate = gate

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> None:  # type: ignore[override]  # noqa: N802
        place, caller = self._gate.take_place(), caller_of_call()
        asker = asker_of_call(context, request.user)
        with refusals_told(request.request_id, self._app.metrics):
            asked = await self._app.read(request, asker)
        generation = self._app.begin(
            asked,
            caller=caller,
            place=place,
            asker=asker,
            deadline_left_s=context.time_remaining(),
            traceparent=traceparent_of(context.invocation_metadata()),
        )
        stall = _Stall()
        generation.on_stalled = stall.end_write
        try:
            async for event in generation:
                await context.write(event_to_proto(event))
        except asyncio.CancelledError:
            stall.raise_if_over()
            raise
        finally:  # also when gRPC cancels this call because the client is gone
            generation.close()

    async def Abort(self, request: pb.AbortRequest, context: Any) -> pb.AbortResponse:  # noqa: N802
        self._app.abort(request.request_id, caller_of_call())
        return pb.AbortResponse()

    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:  # noqa: N802
        asker, turns = asker_of_call(context), self._app.turns
        with large_ones_counted(self._app.metrics):
            source = await turns.call(lambda: _source(request), user=asker, num_bytes=request.ByteSize())
            ids = await self._app.tokenize(source, asker)
            return await turns.call(lambda: _token_ids(ids), user=asker, num_bytes=len(ids))

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Any) -> pb.DetokenizeResponse:  # noqa: N802
        asker = asker_of_call(context)
        with large_ones_counted(self._app.metrics):
            if request.each:
                return pb.DetokenizeResponse(tokens=await self._app.token_bytes(request.token_ids, asker))
            return pb.DetokenizeResponse(text=await self._app.detokenize(request.token_ids, asker))

    async def GetModel(self, request: pb.GetModelRequest, context: Any) -> pb.GetModelResponse:  # noqa: N802
        return MODEL_INFO.write(await self._app.model())

    async def GetStatus(self, request: pb.GetStatusRequest, context: Any) -> pb.GetStatusResponse:  # noqa: N802
        return CLUSTER_STATUS.write(self._app.status(explain=request.explain, caller=caller_of_call()))


class _Stall:
    """Ends the write in which a call hangs whose client doesn't read; made in the call's own task."""

    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._over = False

    def end_write(self) -> None:
        """The client is given up."""
        self._over = True
        self._task.cancel()

    def raise_if_over(self) -> None:
        """In place of a CancelledError that came from here, so that the client gets a status."""
        if self._over:
            self._task.uncancel()
            raise RequestCancelled("the client doesn't read its stream")


def _source(request: pb.TokenizeRequest) -> str | Chat:
    match request.WhichOneof("input"):
        case "text":
            return request.text
        case "chat":
            return chat_from_proto(request.chat)
        case _:
            raise InvalidRequest("a request needs exactly one of text, chat")


def _token_ids(ids: Sequence[int]) -> pb.TokenizeResponse:
    response = pb.TokenizeResponse()
    for begin in range(0, len(ids), _IDS_AT_ONCE):
        response.token_ids.extend(ids[begin : begin + _IDS_AT_ONCE])
    return response
