"""Calls with many requests, over real gRPC, to a router that no worker has joined: how requests end, and calls."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import pytest

from pdserve.clock import SystemClock
from pdserve.errors import InvalidRequest, Overloaded
from pdserve.rpc.v1 import inference_pb2 as pb
from pdserve.rpc.v1 import inference_pb2_grpc
from pdserve.service.rpc_errors import ERROR_KEY, ServerLost
from pdserve.shared_calls import AskApart, MultiplexedCalls
from router.gate import GENERATE_MANY, Gate
from router.many import MOST_ITEMS, MOST_STREAMS, ManyCalls
from tests.support.waiting import until
from tests.unit.router.open_door import MAX_MANY, door, ended, places

GOOD = pb.GenerateRequest(text="hello")
BAD = pb.GenerateRequest(text="hello", sampling=pb.SamplingParams(temperature=-1))


def begin(stream: int, request: pb.GenerateRequest = GOOD, **more: Any) -> pb.OneRequest:
    return pb.OneRequest(stream=stream, begin=request, **more)


async def said(call: Any, *items: pb.OneRequest) -> Any:
    """The same call, with one more message sent."""
    await call.write(pb.ManyRequests(items=items))
    return call


async def next_end(call: Any) -> tuple[int, pb.StreamEnd]:
    (item,) = (await call.read()).items
    return item.stream, item.end


async def test_each_request_has_its_own_place_and_is_told_by_itself_that_none_is_free() -> None:
    async with door(num_places=2) as (app, channel):
        stub = inference_pb2_grpc.InferenceStub(channel)
        call = await said(stub.GenerateMany(), begin(1), begin(2))
        await places(app, 2)
        await said(call, begin(3))
        stream, end = await next_end(call)
        assert stream == 3
        assert (end.code, end.error) == (grpc.StatusCode.RESOURCE_EXHAUSTED.value[0], "Overloaded")
        assert end.retry_after_ms > 0
        assert ended(app, "RESOURCE_EXHAUSTED") == 1
        await said(call, pb.OneRequest(stream=1, cancel=True))
        await places(app, 1)
        await said(call, begin(4))
        await places(app, 2)
        call.cancel()
        await places(app, 0)


async def test_a_bad_request_ends_by_itself() -> None:
    async with door(num_places=2) as (app, channel):
        call = await said(inference_pb2_grpc.InferenceStub(channel).GenerateMany(), begin(1), begin(2, BAD))
        stream, end = await next_end(call)
        assert (stream, end.error) == (2, "InvalidRequest")
        assert "temperature" in end.details
        assert ended(app, "INVALID_ARGUMENT") == 1
        await places(app, 1)
        call.cancel()
        await places(app, 0)


async def test_a_request_has_its_own_deadline() -> None:
    async with door(num_places=2) as (app, channel):
        call = inference_pb2_grpc.InferenceStub(channel).GenerateMany()
        await said(call, begin(1), begin(2, timeout_ms=1))
        stream, end = await next_end(call)
        assert (stream, end.error) == (2, "DeadlineExceeded")
        call.cancel()
        await places(app, 0)


async def test_a_client_that_says_no_more_gets_what_it_has_asked_for_and_then_the_end() -> None:
    async with door(num_places=2) as (_, channel):
        call = await said(inference_pb2_grpc.InferenceStub(channel).GenerateMany(), begin(1, BAD))
        await call.done_writing()
        assert (await next_end(call))[0] == 1
        assert await call.code() is grpc.StatusCode.OK


@pytest.mark.parametrize(
    "message",
    [
        pytest.param(pb.ManyRequests(items=[begin(0)]).SerializeToString(), id="number 0"),
        pytest.param(pb.ManyRequests(items=[begin(2), begin(1)]).SerializeToString(), id="falling"),
        pytest.param(pb.ManyRequests(items=[begin(1), begin(1)]).SerializeToString(), id="twice"),
        pytest.param(
            pb.ManyRequests(items=[begin(each + 1) for each in range(MOST_ITEMS + 1)]).SerializeToString(),
            id="too many",
        ),
        pytest.param(b"\xff\xff\xff", id="garbage"),
        pytest.param(bytes(1 << 19) + b"x", id="too large"),
    ],
)
async def test_what_breaks_a_rule_ends_the_call_and_all_its_requests(message: bytes) -> None:
    async with door(num_places=4) as (app, channel):
        call = channel.stream_stream(GENERATE_MANY)()
        await call.write(message)
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert dict(await call.trailing_metadata())[ERROR_KEY] == "InvalidRequest"
        await places(app, 0)


async def test_what_is_said_of_requests_that_have_ended_is_passed_over() -> None:
    async with door(num_places=1) as (app, channel):
        call = await said(
            inference_pb2_grpc.InferenceStub(channel).GenerateMany(),
            pb.OneRequest(stream=5, cancel=True),
            pb.OneRequest(stream=6, taken=3),
            pb.OneRequest(stream=8),
            begin(9),
        )
        await places(app, 1)
        call.cancel()
        await places(app, 0)


class Unread:
    """The context of a call whose client reads nothing."""

    def __init__(self) -> None:
        self.num_written = 0

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    async def write(self, message: pb.ManyResponses) -> None:
        self.num_written += 1
        await asyncio.Event().wait()


async def test_requests_of_a_call_at_a_time_are_bounded_when_their_ends_are_not_read() -> None:
    async def ever_more() -> AsyncIterator[pb.ManyRequests]:
        for first in itertools.count(1, MOST_ITEMS):
            yield pb.ManyRequests(items=[begin(first + each, BAD) for each in range(MOST_ITEMS)])
            asked.append(first)
            await asyncio.sleep(0)

    asked: list[int] = []
    unread = Unread()
    async with door(num_places=1) as (app, _):
        calls = ManyCalls(app, Gate(app.admission, app.metrics, SystemClock()), SystemClock(), 1)
        with pytest.raises(Overloaded, match="too many requests of a call"):
            await calls.serve(ever_more(), unread)
        assert MOST_STREAMS - MOST_ITEMS <= asked[-1] <= MOST_STREAMS + 2 * MOST_ITEMS
        assert unread.num_written == 1
        await places(app, 0)


async def test_more_such_calls_than_the_router_takes_are_refused() -> None:
    async with door(num_places=8) as (app, channel):
        stub = inference_pb2_grpc.InferenceStub(channel)
        calls = [await said(stub.GenerateMany(), begin(1)) for _ in range(MAX_MANY)]
        await places(app, MAX_MANY)
        assert app.metrics.registry.get_sample_value("pdserve_shared_calls") == MAX_MANY
        refused = stub.GenerateMany()
        assert await refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        for call in calls:
            call.cancel()
        await places(app, 0)
        again = await said(stub.GenerateMany(), begin(1))
        await places(app, 1)
        again.cancel()
        await places(app, 0)


async def test_a_call_without_requests_ends_by_itself_and_one_that_waits_does_not() -> None:
    async with door(num_places=2, idle_s=0.01) as (app, channel):
        stub = inference_pb2_grpc.InferenceStub(channel)
        waiting = await said(stub.GenerateMany(), begin(1))
        await places(app, 1)
        assert await stub.GenerateMany().code() is grpc.StatusCode.OK
        ended_again = await said(stub.GenerateMany(), begin(1, BAD))
        await next_end(ended_again)
        assert await ended_again.code() is grpc.StatusCode.OK
        assert app.metrics.registry.get_sample_value("pdserve_shared_calls") == 1
        waiting.cancel()
        await places(app, 0)


async def test_a_client_ends_its_call_when_it_has_no_requests_and_begins_another_for_the_next() -> None:
    async with door(num_places=2) as (app, channel):
        calls = MultiplexedCalls(lambda target: channel, idle_s=0.01)

        async def is_ended() -> bool:
            return app.metrics.registry.get_sample_value("pdserve_shared_calls") == 0

        for _ in range(2):
            stream = calls.begin("here", BAD, (), None)
            with pytest.raises(InvalidRequest, match="temperature"):
                await anext(stream)
            stream.close()
            await until("the call has ended", is_ended)
        waiting = calls.begin("here", GOOD, (), None)
        await places(app, 1)
        await calls.close()
        with pytest.raises(ServerLost, match="the client was closed"):
            await anext(waiting)
        await places(app, 0)
        await calls.close()


async def test_a_large_request_has_a_call_of_its_own() -> None:
    async with door(num_places=2) as (_, channel):
        calls = MultiplexedCalls(lambda target: channel)
        with pytest.raises(AskApart):
            calls.begin("here", pb.GenerateRequest(text="x" * (1 << 20)), (), None)
        await calls.close()
