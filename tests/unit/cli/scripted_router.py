"""A gRPC server that answers as a router would, with what a test tells it: for the commands that talk to one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent import futures
from types import TracebackType
from typing import Any, Self

import grpc

from pdserve.errors import InvalidRequest, PdserveError
from pdserve.rpc.v1 import admin_pb2
from pdserve.rpc.v1 import inference_pb2 as pb
from pdserve.rpc.v1.admin_pb2_grpc import AdminServicer, add_AdminServicer_to_server
from pdserve.rpc.v1.inference_pb2_grpc import InferenceServicer, add_InferenceServicer_to_server
from pdserve.service.peer_proof import ROUTER_KEY
from pdserve.service.rpc_errors import status_of

WINDOW_TOKENS = 64
Order = admin_pb2.SetRoleRequest | admin_pb2.DrainWorkerRequest | admin_pb2.ProbePairRequest


def num_characters(chat: pb.Chat) -> int:
    """Which is its number of tokens, here."""
    return sum(len(message.content) for message in chat.messages)


class ScriptedRouter(InferenceServicer, AdminServicer):
    """Streams `pieces`, one id and one text each; remembers the requests. A context manager."""

    def __init__(self, pieces: tuple[str, ...] = ("Hel", "lo", " wörld"), has_template: bool = True) -> None:
        self.pieces = pieces
        self.refuse: PdserveError | None = None
        self.wait_behind: int | None = (
            None  # pieces after which the stream stands still until it is cancelled
        )
        self.cancelled = threading.Event()
        self.requests: list[pb.GenerateRequest] = []
        self.orders: list[Order] = []
        self._has_template = has_template
        self._server = grpc.server(futures.ThreadPoolExecutor(4))
        add_InferenceServicer_to_server(self, self._server)
        add_AdminServicer_to_server(self, self._server)
        self.target = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.stop(None).wait()

    def Generate(self, request: pb.GenerateRequest, context: Any) -> Iterator[pb.GenerateResponse]:  # noqa: N802
        context.add_callback(self.cancelled.set)
        self.requests.append(request)
        num_tokens = num_characters(request.chat)
        refuse = self.refuse
        if num_tokens >= WINDOW_TOKENS:
            refuse = InvalidRequest("prompt and max_tokens don't fit the window", limit=WINDOW_TOKENS)
        if refuse is not None:
            code, details, trailers = status_of(refuse)
            context.set_trailing_metadata(trailers)
            context.abort(code, details)
        yield pb.GenerateResponse(
            started=pb.Started(
                request_id="r1",
                seed=7,
                num_prompt_tokens=2,
                num_cached_tokens=1,
                prompt_token_ids=[5, 6],
                model="m",
            )
        )
        for index, piece in enumerate(self.pieces):
            if index == self.wait_behind:
                self.cancelled.wait()
                return
            yield pb.GenerateResponse(
                tokens=pb.Tokens(first_index=index, token_ids=[100 + index], text=piece)
            )
        yield pb.GenerateResponse(
            finished=pb.Finished(
                reason=pb.FINISH_REASON_EOS,
                usage=pb.Usage(
                    num_prompt_tokens=num_tokens or 2,
                    num_cached_tokens=1,
                    num_completion_tokens=len(self.pieces),
                ),
                timings=pb.Timings(ttft_ms=12.3456, total_ms=20),
                num_attempts=1,
                prefill_worker="prefill-0",
                decode_worker="decode-0",
                kv_bytes=1024,
                transport="stream",
            )
        )

    def GenerateMany(self, requests: Any, context: Any) -> Any:  # noqa: N802
        """An earlier router's answer."""
        context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")

    def Abort(self, request: pb.AbortRequest, context: Any) -> pb.AbortResponse:  # noqa: N802
        return pb.AbortResponse()

    def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:  # noqa: N802
        return pb.TokenizeResponse(
            token_ids=list(request.text.encode()) or [7] * num_characters(request.chat)
        )

    def Detokenize(self, request: pb.DetokenizeRequest, context: Any) -> pb.DetokenizeResponse:  # noqa: N802
        return pb.DetokenizeResponse(text=bytes(request.token_ids).decode())

    def GetModel(self, request: pb.GetModelRequest, context: Any) -> pb.GetModelResponse:  # noqa: N802
        return pb.GetModelResponse(
            model="m", window_tokens=WINDOW_TOKENS, vocab_size=300, has_chat_template=self._has_template
        )

    def GetStatus(self, request: pb.GetStatusRequest, context: Any) -> pb.GetStatusResponse:  # noqa: N802
        """For clients, and for operators."""
        context.send_initial_metadata(((ROUTER_KEY, "router-1"),))
        return pb.GetStatusResponse(
            router_id="router-1",
            workers=[
                pb.WorkerStatus(
                    id="decode-0",
                    role="decode",
                    epoch="1.2",
                    state="up",
                    blocks=pb.BlockCounts(free=90, granted=1, owned=2, cached=6, quarantined=1),
                    num_running=4,
                    num_waiting=5,
                    num_queued_tokens=6,
                    num_cache_hit_tokens=32,
                    num_cache_query_tokens=64,
                    metrics_address="127.0.0.1:9",
                    num_steps=11,
                )
            ],
            pairs=[
                pb.PairStatus(
                    prefill_worker="prefill-0", decode_worker="decode-0", up=True, transport="stream"
                ),
                pb.PairStatus(
                    prefill_worker="prefill-1", decode_worker="decode-0", up=False, reason="full [x]"
                ),
            ],
            queue=pb.QueueStatus(num_waiting=1, num_waiting_tokens=100, num_running=4, limit=1024),
            placements=_placements() if request.explain else [],
            scaling=pb.ScalingStatus(
                num_prefill=1,
                num_decode=2,
                why="prefill 1: [at ease]; decode 2: all are needed",
                age_s=0.5,
                last_change="decode 1 → 2: 90% of the blocks are held",
                change_age_s=75.0,
            ),
        )

    def SetRole(self, request: admin_pb2.SetRoleRequest, context: Any) -> admin_pb2.SetRoleResponse:  # noqa: N802
        self._take_order(request, context)
        return admin_pb2.SetRoleResponse()

    def DrainWorker(  # noqa: N802
        self, request: admin_pb2.DrainWorkerRequest, context: Any
    ) -> admin_pb2.DrainWorkerResponse:
        self._take_order(request, context)
        return admin_pb2.DrainWorkerResponse()

    def ProbePair(self, request: admin_pb2.ProbePairRequest, context: Any) -> admin_pb2.ProbePairResponse:  # noqa: N802
        self._take_order(request, context)
        return admin_pb2.ProbePairResponse(
            num_prompt_tokens=request.num_tokens,
            num_kv_bytes=1000 * request.num_tokens,
            transfer_s=0.5e-3 * request.num_tokens,
            ttft_s=0.25,
            transport="memfd",
        )

    def NoteScaling(self, request: admin_pb2.ScalingNote, context: Any) -> admin_pb2.NoteScalingResponse:  # noqa: N802
        raise NotImplementedError

    def _take_order(self, order: Order, context: Any) -> None:
        context.send_initial_metadata(((ROUTER_KEY, "router-1"),))
        self.orders.append(order)
        if self.refuse is not None:
            code, details, trailers = status_of(self.refuse)
            context.set_trailing_metadata(trailers)
            context.abort(code, details)


def _placements() -> list[pb.Placement]:
    cost = [pb.CostPart(name="queue", ms=2.5), pb.CostPart(name="prefill", ms=40.0)]
    won = pb.Candidate(prefill_worker="prefill-0", decode_worker="decode-0", chosen=True, cost=cost)
    fell = pb.Candidate(decode_worker="decode-0", reason="[slower] than a prefill worker", cost=cost)
    no = pb.Candidate(prefill_worker="prefill-1", decode_worker="decode-0", reason="no credit of prefill-1")
    timings = pb.Timings(ttft_ms=127.5, queue_ms=20.25, prefill_ms=107.25)
    return [
        pb.Placement(request_id="r1", attempt=1, age_s=1.25, candidates=[won, fell], timings=timings),
        pb.Placement(request_id="r2", choice=1, attempt=0, age_s=0.5, candidates=[no]),
    ]
