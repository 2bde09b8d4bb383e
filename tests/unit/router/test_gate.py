"""The gate in front of a real gRPC server: who gets a place, who is told at once that there is none."""

from __future__ import annotations

import grpc.aio
import pytest

from pdserve.rpc.v1 import inference_pb2 as pb
from pdserve.rpc.v1 import inference_pb2_grpc
from pdserve.service.rpc_errors import ERROR_KEY, RETRY_AFTER_KEY
from router.gate import GENERATE
from tests.unit.router.open_door import door, ended, places

ASKED = pb.GenerateRequest(text="hello")


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
