"""The gate in front of a real gRPC server: who gets a place, who is told at once that there is none."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import pytest

from pdserve.clock import SystemClock
from pdserve.rpc.v1 import inference_pb2 as pb
from pdserve.rpc.v1 import inference_pb2_grpc
from pdserve.service.receiving import Receiving
from pdserve.service.rpc import bind, make_server
from pdserve.service.rpc_errors import ERROR_KEY, RETRY_AFTER_KEY
from pdserve.service.rpc_requests import RequestReader
from router.app import RouterApp
from router.caller_interceptor import CallerInterceptor, asker_of_call
from router.door import InferenceServicer
from router.gate import GENERATE, Gate
from router.work import InlineWork
from tests.support.waiting import until
from tests.unit.router.scripted import config

ASKED = pb.GenerateRequest(text="hello")


@asynccontextmanager
async def door(num_places: int) -> AsyncIterator[tuple[RouterApp, Any]]:
    """A router that no worker has joined: every request waits in it, in one of the places."""
    clock, source = SystemClock(), random.Random(1)
    asked = config({"max_queued_requests": num_places})
    async with RouterApp(asked, clock, source, work=InlineWork()) as app:
        gate = Gate(app.admission, app.metrics, clock)
        receiving = Receiving(8, clock, app.metrics.receiving_refused.inc)
        reader = RequestReader(1 << 20, app.turns, asker_of_call, app.on_unread, receiving)
        gates = (CallerInterceptor(app.callers, app.metrics), gate, reader)
        server = make_server(keepalive_s=1.0, max_message_bytes=1 << 20, random=source, gates=gates)
        inference_pb2_grpc.add_InferenceServicer_to_server(InferenceServicer(app, gate), server)
        address = bind(server, "127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(address) as channel:
            yield app, channel
        await server.stop(None)


def ended(app: RouterApp, status: str) -> float:
    return app.metrics.registry.get_sample_value("pdserve_requests_total", {"status": status}) or 0.0


async def places(app: RouterApp, number: int) -> None:
    async def look() -> bool:
        return app.admission.num_places == number

    await until(f"{number} places are taken", look)


async def test_who_finds_no_place_is_told_when_to_come_back_without_a_word_of_its_message_being_read() -> (
    None
):
    async with door(num_places=2) as (app, channel):
        stub = inference_pb2_grpc.InferenceStub(channel)
        waiting = [stub.Generate(ASKED) for _ in range(2)]
        await places(app, 2)
        silent = channel.stream_stream(GENERATE)()  # never sends its request
        calls = (stub.Generate(ASKED), silent, stub.Tokenize(pb.TokenizeRequest(text="x")))
        for call in calls:
            trailers = dict(await call.trailing_metadata())
            assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert trailers[ERROR_KEY] == "Overloaded"
            assert int(trailers[RETRY_AFTER_KEY]) > 0
        assert ended(app, "RESOURCE_EXHAUSTED") == 2  # a call to tokenize is no request
        assert app.metrics.registry.get_sample_value("pdserve_queue_refused_total", {"reason": "full"}) == 3
        waiting[0].cancel()
        await places(app, 1)
        again = stub.Generate(ASKED)
        await places(app, 2)
        for call in (waiting[1], again):
            call.cancel()
        await places(app, 0)


async def test_a_client_that_goes_before_its_message_has_come_gives_its_place_back_and_is_counted() -> None:
    async with door(num_places=1) as (app, channel):
        silent = channel.stream_stream(GENERATE)()
        await silent.wait_for_connection()
        await places(app, 1)
        assert app.metrics.registry.get_sample_value("pdserve_queue_places") == 1
        silent.cancel()
        await places(app, 0)
        assert ended(app, "CANCELLED") == 1


async def test_a_message_that_is_none_is_the_clients_fault_and_counted_as_such() -> None:
    async with door(num_places=1) as (app, channel):
        call = channel.unary_stream(GENERATE)(b"\xff\xff\xff")
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call.read()
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        await places(app, 0)
        assert ended(app, "INVALID_ARGUMENT") == 1
        assert ended(app, "CANCELLED") == 0


async def test_a_draining_router_says_so_before_anything_is_read() -> None:
    async with door(num_places=1) as (app, channel):
        app.admission.draining = True
        silent = channel.stream_stream(GENERATE)()
        assert await silent.code() is grpc.StatusCode.UNAVAILABLE
        assert dict(await silent.trailing_metadata())[ERROR_KEY] == "Draining"
        assert ended(app, "UNAVAILABLE") == 1
