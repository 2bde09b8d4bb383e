"""The router as an engine of vLLM, for the gateways that speak its gRPC service. Same places, keys, turns as ours."""

from __future__ import annotations

from typing import Any

from pdserve.clock import Clock
from pdserve.errors import UnknownRequest
from pdserve.rpc.v1 import vllm_engine_pb2 as pb
from pdserve.rpc.v1 import vllm_engine_pb2_grpc
from router.app import RouterApp
from router.caller_interceptor import caller_of_call
from router.gate import Gate
from router.generating import generating
from router.vllm_answer import VllmAnswer
from router.vllm_request import request_from

SERVER_TYPE = "pdserve"


class VllmEngineServicer(vllm_engine_pb2_grpc.VllmEngineServicer):
    """Event-loop thread only. gate: where each call has got its place."""

    def __init__(self, app: RouterApp, gate: Gate, clock: Clock) -> None:
        self._app = app
        self._gate = gate
        self._clock = clock
        self._began_s = clock.now_s()

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> None:  # type: ignore[override]  # noqa: N802
        answer = VllmAnswer(streams=request.stream, stop=request.sampling_params.stop)
        async with generating(
            self._app,
            self._gate,
            context,
            request.request_id,
            lambda limits: request_from(request, limits),
            num_bytes=request.ByteSize(),
        ) as events:
            async for event in events:
                for response in answer.take(event):
                    await context.write(response)

    async def Abort(self, request: pb.AbortRequest, context: Any) -> pb.AbortResponse:  # noqa: N802
        for request_id in request.request_ids:
            try:
                self._app.abort(request_id, caller_of_call())
            except UnknownRequest:
                continue  # it has ended meanwhile, which is what was wanted
        return pb.AbortResponse()

    async def HealthCheck(self, request: pb.HealthCheckRequest, context: Any) -> pb.HealthCheckResponse:  # noqa: N802
        if self._app.admission.draining:
            return pb.HealthCheckResponse(healthy=False, message="draining")
        is_serving = self._app.serving
        return pb.HealthCheckResponse(
            healthy=is_serving, message="" if is_serving else "no worker takes requests yet"
        )

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Any) -> pb.GetModelInfoResponse:  # noqa: N802
        model = await self._app.model()
        return pb.GetModelInfoResponse(
            model_path=model.model,
            served_model_name=model.model,
            is_generation=True,
            max_context_length=model.window_tokens,
            max_req_input_len=model.window_tokens,
            vocab_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
        )

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Any) -> pb.GetServerInfoResponse:  # noqa: N802
        status = self._app.status(caller=caller_of_call())
        return pb.GetServerInfoResponse(
            active_requests=status.queue.num_running,
            is_paused=status.draining,
            uptime_seconds=self._clock.now_s() - self._began_s,
            server_type=SERVER_TYPE,
            data_parallel_size=1,
        )
