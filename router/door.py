"""The public gRPC service: protobuf outside, our dataclasses inside. Errors are mapped by the server's interceptor."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from pdserve.errors import InvalidRequest
from pdserve.request import Chat, Limits, chat_from_proto, event_to_proto
from pdserve.rpc.v1 import inference_pb2 as pb
from pdserve.rpc.v1 import inference_pb2_grpc
from pdserve.status import CLUSTER_STATUS, MODEL_INFO
from router.app import RouterApp
from router.caller_interceptor import asker_of_call, caller_of_call
from router.gate import Gate
from router.generating import generating
from router.many import ManyCalls
from router.summary import large_ones_counted
from router.validation import read_message

_IDS_AT_ONCE = 65_536  # which hold the interpreter for a millisecond


class InferenceServicer(inference_pb2_grpc.InferenceServicer):
    """Event-loop thread only. gate: where each call has got its place. many: for calls that have many requests."""

    def __init__(self, app: RouterApp, gate: Gate, many: ManyCalls) -> None:
        self._app = app
        self._gate = gate
        self._many = many

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> None:  # type: ignore[override]  # noqa: N802
        async with generating(
            self._app,
            self._gate,
            context,
            request.request_id,
            lambda limits: read_message(request, limits),
            num_bytes=request.ByteSize(),
            user=request.user,
        ) as events:
            async for event in events:
                await context.write(event_to_proto(event))

    async def GenerateMany(self, requests: AsyncIterator[pb.ManyRequests], context: Any) -> None:  # type: ignore[override]  # noqa: N802
        await self._many.serve(requests, context)

    async def Abort(self, request: pb.AbortRequest, context: Any) -> pb.AbortResponse:  # noqa: N802
        self._app.abort(request.request_id, caller_of_call())
        return pb.AbortResponse()

    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:  # noqa: N802
        asker, turns = asker_of_call(context), self._app.turns
        with large_ones_counted(self._app.metrics):
            limits = self._app.fleet.limits
            source = await turns.call(
                lambda: _source(request, limits), user=asker, num_bytes=request.ByteSize()
            )
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


def _source(request: pb.TokenizeRequest, limits: Limits) -> str | Chat:
    match request.WhichOneof("input"):
        case "text":
            return request.text
        case "chat":
            limits.check_messages(len(request.chat.messages))
            return chat_from_proto(request.chat)
        case _:
            raise InvalidRequest("a request needs exactly one of text, chat")


def _token_ids(ids: Sequence[int]) -> pb.TokenizeResponse:
    response = pb.TokenizeResponse()
    for begin in range(0, len(ids), _IDS_AT_ONCE):
        response.token_ids.extend(ids[begin : begin + _IDS_AT_ONCE])
    return response
