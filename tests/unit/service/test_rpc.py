"""How errors leave a server and what a client makes of them; health and reflection; binding."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import threading
from collections.abc import AsyncGenerator
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from pdserve import errors
from pdserve.request import Event, GenerateRequest
from pdserve.rpc.v1 import inference_pb2 as pb
from pdserve.rpc.v1 import inference_pb2_grpc
from pdserve.rpc.v1.inference_pb2_grpc import InferenceStub
from pdserve.service.peer_proof import read_metadata
from pdserve.service.rpc import INFERENCE, Health, bind, keepalive_options, make_server, open_channel
from pdserve.service.rpc_errors import ERROR_KEY, ServerLost, error_of, status_of
from pdserve.service.settings import ConfigError
from tests.unit.service.doors import Door, count_to, open_door, started, token

ERRORS: list[errors.PdserveError] = [
    errors.InvalidRequest("top_p out of range", limit=1, value=2),
    errors.UnknownModel("no such model", model="x"),
    errors.Overloaded("the queue is full", retry_after_s=1.25, limit=3),
    errors.DeadlineExceeded("too late"),
    errors.RequestCancelled("aborted"),
    errors.NoWorker("no prefill worker joined", role="prefill"),
    errors.Draining("going"),
    errors.Stale("old"),
    errors.KvCorrupt("bits"),
    errors.Incompatible("layouts differ", field="dtype"),
    errors.InvariantViolated("a bug", where="here"),
    errors.Unauthenticated("who are you"),
    errors.InvalidRequest("日本語 🙂 " + "x" * 5000),
]


async def call_abort(door: Door) -> grpc.aio.AioRpcError:
    async with open_door(door) as (address, _), open_channel(address, keepalive_s=1.0) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await InferenceStub(channel).Abort(pb.AbortRequest(request_id="r"))
        return caught.value


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
async def test_our_errors_arrive_as_themselves(error: errors.PdserveError) -> None:
    told = await call_abort(Door(count_to, error))
    assert told.code() is grpc.StatusCode[error.code.value]
    back = error_of(told, "target")
    assert type(back) is type(error)
    assert str(back).startswith(str(error)[:500].split(" (retry_after_s")[0])
    if isinstance(error, errors.Overloaded):
        assert isinstance(back, errors.Overloaded)
        assert back.retry_after_s == 1.25
        trailers = read_metadata(told.trailing_metadata())
        assert trailers["retry-after-ms"] == "1250"


async def test_an_unknown_error_is_internal_with_an_id_and_no_traceback(
    capfd: pytest.CaptureFixture[str],
) -> None:
    told = await call_abort(Door(count_to, ZeroDivisionError("secret detail")))
    assert told.code() is grpc.StatusCode.INTERNAL
    details = told.details() or ""
    assert "secret" not in details
    assert "Traceback" not in details
    error_id = details.rsplit(" ", 1)[1]
    assert error_id.startswith("error-")
    out, err = capfd.readouterr()
    assert error_id in out + err
    assert "secret detail" in out + err


async def test_the_first_of_ours_in_a_group_is_told() -> None:
    group = ExceptionGroup("", [ValueError("x"), ExceptionGroup("", [errors.KvCorrupt("bits")])])
    assert (await call_abort(Door(count_to, group))).code() is grpc.StatusCode.DATA_LOSS


async def test_an_error_in_mid_stream_follows_what_was_sent() -> None:
    async def answer(request: GenerateRequest) -> AsyncGenerator[Event, None]:
        yield started(request)
        yield token(0)
        raise errors.WorkerLost("all attempts failed", attempts=3)

    async with open_door(Door(answer)) as (address, _), open_channel(address, keepalive_s=1.0) as channel:
        call = InferenceStub(channel).Generate(pb.GenerateRequest(text="x"))
        seen = []
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for msg in call:
                seen.append(msg.WhichOneof("event"))
    assert seen == ["started", "tokens"]
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert str(error_of(caught.value, "t")) == "all attempts failed (attempts=3)"


async def test_a_bad_request_is_refused_by_the_validation_in_the_servicer() -> None:
    async with open_door(Door(count_to)) as (address, _), open_channel(address, keepalive_s=1.0) as channel:
        call = InferenceStub(channel).Generate(pb.GenerateRequest())
        with pytest.raises(grpc.aio.AioRpcError, match="exactly one of text"):
            await call.read()


async def test_nobody_there_is_server_lost() -> None:
    async with open_door(Door(count_to)) as (address, _):
        pass
    async with open_channel(address, keepalive_s=1.0) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await InferenceStub(channel).GetModel(pb.GetModelRequest())
    told = error_of(caught.value, address)
    assert isinstance(told, ServerLost)
    assert told.fields["target"] == address


async def test_a_message_over_the_limit_is_invalid_not_lost() -> None:
    async with open_door(Door(count_to)) as (address, _), open_channel(address, keepalive_s=1.0) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await InferenceStub(channel).Tokenize(pb.TokenizeRequest(text="x" * (2 << 20)))
    assert isinstance(error_of(caught.value, address), errors.InvalidRequest)


async def test_what_the_library_turns_away_in_a_flood_is_cancelled_without_our_trailer() -> None:
    """More calls at once than may be pending, while the event loop looks at none of them: docs/reliability.md."""
    server = make_server(
        keepalive_s=60.0, max_message_bytes=1 << 20, random=random.Random(1), max_pending_calls=64
    )
    inference_pb2_grpc.add_InferenceServicer_to_server(Door(count_to), server)
    address = bind(server, "127.0.0.1:0")
    await server.start()
    with grpc.insecure_channel(address) as channel:  # with threads of its own
        stub, turned_away = InferenceStub(channel), threading.Event()
        calls: list[Any] = [stub.GetModel.future(pb.GetModelRequest()) for _ in range(500)]
        for call in calls:
            call.add_done_callback(lambda _: turned_away.set())
        assert turned_away.wait(60.0), "the loop stands still here"
        codes = {await asyncio.to_thread(call.code) for call in calls}
        assert codes == {grpc.StatusCode.OK, grpc.StatusCode.CANCELLED}
        for call in calls:
            if call.code() is grpc.StatusCode.CANCELLED:
                assert ERROR_KEY not in dict(call.trailing_metadata())
                assert isinstance(error_of(call, address), ServerLost), "the client goes to the next router"
    await server.stop(None)


async def test_one_connection_alone_never_meets_the_librarys_bound() -> None:
    """What is above its own waits in its client, and is asked when other calls have ended."""
    server = make_server(
        keepalive_s=60.0,
        max_message_bytes=1 << 20,
        random=random.Random(1),
        max_streams=32,
        max_pending_calls=64,
    )
    door = Door(count_to)
    inference_pb2_grpc.add_InferenceServicer_to_server(door, server)
    address = bind(server, "127.0.0.1:0")
    await server.start()
    with grpc.insecure_channel(address) as channel:
        calls = await asyncio.to_thread(_crowd, InferenceStub(channel), 500)
        codes = {await asyncio.to_thread(call.code) for call in calls}
        assert codes == {grpc.StatusCode.OK}
    await server.stop(None)


def _crowd(stub: Any, num_calls: int) -> list[Any]:
    return [stub.GetModel.future(pb.GetModelRequest()) for _ in range(num_calls)]


async def test_an_unknown_method_is_incompatible() -> None:
    async with open_door(Door(count_to)) as (address, _), open_channel(address, keepalive_s=1.0) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/pdserve.rpc.v1.Inference/Nothing", bytes, bytes)(b"")
    assert isinstance(error_of(caught.value, address), errors.Incompatible)


async def test_a_cancelled_call_cancels_its_servicer() -> None:
    async def answer(request: GenerateRequest) -> AsyncGenerator[Event, None]:
        yield started(request)
        await asyncio.Event().wait()

    door = Door(answer)
    async with open_door(door) as (address, _), open_channel(address, keepalive_s=1.0) as channel:
        call = InferenceStub(channel).Generate(pb.GenerateRequest(text="x"))
        await call.read()
        call.cancel()
        async with asyncio.timeout(20):
            await door.cancelled.wait()


async def test_a_call_that_is_cancelled_in_a_write_ends_its_servicer_itself() -> None:
    writing = asyncio.Event()

    async def answer(request: GenerateRequest) -> AsyncGenerator[Event, None]:
        yield started(request)
        writing.set()
        while True:
            yield dataclasses.replace(token(0), text="x" * (1 << 19))  # more than a connection takes unread

    door = Door(answer)
    async with open_door(door) as (address, _), open_channel(address, keepalive_s=1.0) as channel:
        call = InferenceStub(channel).Generate(pb.GenerateRequest(text="x"))
        await call.read()
        await writing.wait()
        call.cancel()
        async with asyncio.timeout(20):
            await door.cancelled.wait()


async def test_health_follows_what_it_is_told() -> None:
    server = make_server(keepalive_s=1.0, max_message_bytes=1 << 20, random=random.Random(1))
    health = Health(server)
    address = bind(server, "127.0.0.1:0")
    await server.start()
    serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
    async with open_channel(address, keepalive_s=1.0) as channel:
        stub = health_pb2_grpc.HealthStub(channel)

        async def ask(service: str) -> int:
            return int((await stub.Check(health_pb2.HealthCheckRequest(service=service))).status)

        assert await ask("") == serving
        await health.not_serving(INFERENCE)
        assert await ask(INFERENCE) == not_serving
        await health.serving(INFERENCE)
        assert await ask(INFERENCE) == serving
        await health.drain()
        await health.serving(INFERENCE)
        assert await ask(INFERENCE) == not_serving
        with pytest.raises(grpc.aio.AioRpcError, match=r"NOT_FOUND"):
            await ask("nothing")
    await server.stop(None)


async def test_reflection_names_the_services_and_their_messages() -> None:
    async with open_door(Door(count_to)) as (address, _), open_channel(address, keepalive_s=1.0) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        asked = [
            reflection_pb2.ServerReflectionRequest(list_services=""),
            reflection_pb2.ServerReflectionRequest(file_containing_symbol="pdserve.rpc.v1.GenerateRequest"),
        ]
        answers = [answer async for answer in stub.ServerReflectionInfo(iter(asked))]
    names = {service.name for service in answers[0].list_services_response.service}
    assert names == {INFERENCE, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
    assert answers[1].file_descriptor_response.file_descriptor_proto


async def test_a_taken_port_is_a_configuration_error() -> None:
    async with open_door(Door(count_to)) as (address, _):
        server = make_server(keepalive_s=1.0, max_message_bytes=1 << 20, random=random.Random(1))
        with pytest.raises(ConfigError, match=r"router\.listen: can't listen on"):
            bind(server, address)


def test_the_option_without_which_a_stopped_peer_goes_unnoticed_is_set() -> None:
    assert ("grpc.http2.ping_timeout_ms", 1000) in keepalive_options(1.0)


def test_long_details_are_cut_to_fit_a_header() -> None:
    _, details, _ = status_of(errors.InvalidRequest("x" * 5000))
    assert len(details) == 1000
