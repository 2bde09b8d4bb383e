"""A server compares a request's size before it makes anything of its bytes; over real gRPC on loopback."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdserve import errors
from pdserve.clock import SystemClock
from pdserve.rpc.v1 import inference_pb2 as pb
from pdserve.rpc.v1 import inference_pb2_grpc
from pdserve.rpc.v1.inference_pb2_grpc import InferenceStub
from pdserve.service.receiving import Receiving
from pdserve.service.rpc import Health, bind, make_server, open_channel
from pdserve.service.rpc_errors import error_of
from pdserve.service.rpc_requests import READ_AT_ONCE_BYTES, RequestReader
from pdserve.steps import Steps, finish
from tests.unit.service.doors import Door, count_to

T = TypeVar("T")
MAX_BYTES = 100_000
MOST = 4  # messages that come in at a time
TOKENIZE = "/pdserve.rpc.v1.Inference/Tokenize"


class Recorded:
    """Reads at once, and remembers for whom."""

    def __init__(self) -> None:
        self.read: list[tuple[str, int]] = []
        self.refused: list[errors.PdserveError] = []

    async def run(self, steps: Steps[T], *, user: str, num_bytes: int) -> T:
        self.read.append((user, num_bytes))
        return finish(steps)


@asynccontextmanager
async def serving(recorded: Recorded) -> AsyncIterator[grpc.aio.Channel]:
    server = make_server(
        keepalive_s=1.0,
        max_message_bytes=4 * MAX_BYTES,
        random=random.Random(1),
        gates=(
            RequestReader(
                MAX_BYTES,
                recorded,
                lambda context: context.peer(),
                recorded.refused.append,
                Receiving(MOST, SystemClock(), lambda: None),
            ),
        ),
    )
    inference_pb2_grpc.add_InferenceServicer_to_server(Door(count_to), server)
    Health(server)
    address = bind(server, "127.0.0.1:0")
    await server.start()
    async with open_channel(address, keepalive_s=1.0) as channel:
        yield channel
    await server.stop(None)


async def refusal(call: Any) -> errors.PdserveError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        if hasattr(call, "__await__"):
            await call
        else:
            async for _ in call:
                pass
    return error_of(caught.value, "target")


async def test_small_ones_are_read_at_once_and_large_ones_where_the_server_says() -> None:
    recorded = Recorded()
    async with serving(recorded) as channel:
        stub = InferenceStub(channel)
        assert (await stub.Tokenize(pb.TokenizeRequest(text="ab"))).token_ids == [97, 98]
        assert recorded.read == []
        large = pb.TokenizeRequest(text="a" * READ_AT_ONCE_BYTES)
        assert len((await stub.Tokenize(large)).token_ids) == READ_AT_ONCE_BYTES
        [(peer, num_bytes)] = recorded.read
        assert peer.startswith("ipv4:127.0.0.1:") and num_bytes == large.ByteSize()
        assert [event async for event in stub.Generate(pb.GenerateRequest(text="a" * 50_000))]
    assert len(recorded.read) == 2 and recorded.refused == []


async def test_one_that_is_too_large_is_refused_with_both_sizes_whatever_is_asked() -> None:
    recorded = Recorded()
    async with serving(recorded) as channel:
        stub = InferenceStub(channel)
        text = "a" * MAX_BYTES
        calls = [
            stub.Generate(pb.GenerateRequest(text=text)),
            stub.Tokenize(pb.TokenizeRequest(text=text)),
            stub.Abort(pb.AbortRequest(request_id=text)),
            health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=text)),
        ]
        for call in calls:
            told = await refusal(call)
            assert isinstance(told, errors.InvalidRequest)
            assert str(told) == f"the message is too large (limit_bytes={MAX_BYTES}, value={MAX_BYTES + 4})"
    assert recorded.read == []
    assert len(recorded.refused) == len(calls)
    assert all(isinstance(each, errors.InvalidRequest) and each.too_large for each in recorded.refused)


async def test_messages_that_never_come_whole_make_room_for_others() -> None:
    async with serving(Recorded()) as channel:
        begin_tokenize: Any = channel.stream_stream(TOKENIZE, None, None)
        silent: list[Any] = [begin_tokenize() for _ in range(MOST + 3)]
        for call in silent:
            await call.wait_for_connection()
        answers = [InferenceStub(channel).Tokenize(pb.TokenizeRequest(text="ab")) for _ in range(5)]
        assert [(await answer).token_ids for answer in answers] == [[97, 98]] * 5
        codes = asyncio.as_completed([call.code() for call in silent])
        for _ in range(4):
            assert await next(codes) is grpc.StatusCode.RESOURCE_EXHAUSTED
        for call in silent:
            call.cancel()


async def test_a_call_without_a_message_is_refused() -> None:
    async with serving(Recorded()) as channel:
        begin_tokenize: Any = channel.stream_stream(TOKENIZE, None, None)
        call: Any = begin_tokenize()
        await call.done_writing()
        assert str(await refusal(call)) == "the call has no message"


async def test_the_librarys_own_limit_reads_like_a_refusal_of_ours() -> None:
    async with serving(Recorded()) as channel:
        told = await refusal(InferenceStub(channel).Tokenize(pb.TokenizeRequest(text="a" * 5 * MAX_BYTES)))
        assert isinstance(told, errors.InvalidRequest)
        assert "400000" in str(told) and "500004" in str(told)


async def test_what_is_no_message_is_refused_without_a_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    recorded = Recorded()
    async with serving(recorded) as channel:
        call: Any = channel.unary_unary(TOKENIZE, None, None)
        for raw in (b"\xff\xff", b"\x0a\x05abc", b"\x0a\x01\xff", b"\xff" * 20_000):
            told = await refusal(call(raw))
            assert isinstance(told, errors.InvalidRequest)
            assert str(told) == f"the message is none of this call's (num_bytes={len(raw)})"
    assert len(recorded.refused) == 4
    out, err = capfd.readouterr()
    assert "Traceback" not in out + err
