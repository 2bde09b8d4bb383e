"""Large requests: refused unread, with their limit and their count; or read, and of a truncated one only the end."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import grpc.aio
import pytest

from pdserve.clock import SystemClock
from pdserve.errors import InvalidRequest
from pdserve.messages import StartDecode
from pdserve.rpc.v1 import inference_pb2 as pb
from pdserve.rpc.v1 import inference_pb2_grpc
from pdserve.service.receiving import Receiving
from pdserve.service.rpc import bind, make_server
from pdserve.service.rpc_requests import RequestReader
from router.app import RouterApp
from router.caller_interceptor import CallerInterceptor, asker_of_call
from router.door import InferenceServicer
from router.gate import GENERATE, Gate
from router.many import ManyCalls
from tests.support.waiting import until
from tests.unit.router.scripted import Cluster, config, virtual

T = TypeVar("T")
MAX_BYTES = 1 << 20
WINDOW = 1_000
LONGEST = 7  # bytes of the fake tokenizer's <|eos|>


class HeldWork:
    """Does nothing before it is let go."""

    def __init__(self) -> None:
        self.let_go = asyncio.Event()

    async def run(self, call: Callable[[], T], /) -> T:
        await self.let_go.wait()
        return call()


@asynccontextmanager
async def door(work: HeldWork) -> AsyncIterator[tuple[RouterApp, grpc.aio.Channel]]:
    """A router that no worker has joined, behind a real server."""
    clock, source = SystemClock(), random.Random(1)
    async with RouterApp(config(), clock, source, work=work) as app:
        gate = Gate(app.admission, app.metrics, clock)
        receiving = Receiving(8, clock, app.metrics.receiving_refused.inc)
        reader = RequestReader(MAX_BYTES, app.turns, asker_of_call, app.on_unread, receiving)
        server = make_server(
            keepalive_s=1.0,
            max_message_bytes=2 * MAX_BYTES,
            random=source,
            gates=(CallerInterceptor(app.callers, app.metrics), gate, reader),
        )
        inference_pb2_grpc.add_InferenceServicer_to_server(
            InferenceServicer(app, gate, ManyCalls(app, gate, clock, 4)), server
        )
        address = bind(server, "127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(address) as channel:
            yield app, channel
        await server.stop(None)


def counted(app: RouterApp, name: str, **labels: str) -> float:
    return app.metrics.registry.get_sample_value(f"pdserve_{name}", labels) or 0.0


async def at_rest(app: RouterApp) -> None:
    async def look() -> bool:
        return app.admission.num_places == 0 and counted(app, "reading_bytes") == 0

    await until("no place and no budget is held", look)


@pytest.mark.parametrize(
    ("raw", "what", "said"),
    [
        (pb.GenerateRequest(text="a" * MAX_BYTES).SerializeToString(), "message", f"limit_bytes={MAX_BYTES}"),
        (b"\x32\x00" * 300_000, "fields", "limit=262144"),
    ],
    ids=["message", "fields"],
)
async def test_what_is_refused_before_it_is_a_request_is_counted_once_and_holds_nothing(
    raw: bytes, what: str, said: str
) -> None:
    work = HeldWork()
    work.let_go.set()
    async with door(work) as (app, channel):
        call: Any = channel.unary_stream(GENERATE, None, None)(raw)
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert said in await call.details()
        await at_rest(app)
        assert counted(app, "requests_too_large_total", what=what) == 1
        assert counted(app, "requests_total", status="INVALID_ARGUMENT") == 1
        assert counted(app, "requests_total", status="CANCELLED") == 0


async def test_a_client_that_leaves_while_its_message_is_read_holds_nothing_and_is_counted() -> None:
    work = HeldWork()
    async with door(work) as (app, channel):
        message = pb.GenerateRequest(text="a" * 100_000)
        call = inference_pb2_grpc.InferenceStub(channel).Generate(message)

        async def is_read() -> bool:
            return counted(app, "reading_bytes") == message.ByteSize()

        await until("it is being read", is_read)
        call.cancel()
        await at_rest(app)
        assert counted(app, "requests_total", status="CANCELLED") == 1
        work.let_go.set()


async def joined(cluster: Cluster) -> None:
    await cluster.link(
        await cluster.prefill(window_tokens=WINDOW), await cluster.decode(window_tokens=WINDOW)
    )


@virtual
async def test_a_text_that_cannot_fit_is_refused_unread() -> None:
    async with Cluster() as cluster:
        await joined(cluster)
        client = cluster.generate("é" * (WINDOW * LONGEST // 2 + 1))
        await client.end()
        assert isinstance(client.error, InvalidRequest)
        assert str(client.error) == (
            f"text can't fit the window (limit_bytes={WINDOW * LONGEST}, value={WINDOW * LONGEST + 2}, "
            f"window_tokens={WINDOW}, longest_token_bytes={LONGEST})"
        )
        assert counted(cluster.app, "requests_too_large_total", what="text") == 1
        fits = cluster.generate("<|eos|>" * WINDOW)  # as many bytes as there can be, and a token too many
        await fits.end()
        assert "don't fit the window" in str(fits.error)


@virtual
async def test_of_a_truncated_prompt_the_last_ids_are_asked_for() -> None:
    async with Cluster() as cluster:
        await joined(cluster)
        text = "low tide " * 100_000 + "at nine"
        clients = [
            cluster.generate(text, truncate_prompt_tokens=7),
            cluster.generate(tuple(text.encode()[:2_000]) + tuple(b"at nine"), truncate_prompt_tokens=7),
        ]
        await cluster.settle()
        d = cluster.workers[1]
        assert [start.token_ids for start in d.got(StartDecode)] == [tuple(b"at nine")] * 2
        for client in clients:
            client.generation.close()


@virtual
async def test_a_cut_that_leaves_no_room_for_an_answer_is_none() -> None:
    async with Cluster() as cluster:
        await joined(cluster)
        client = cluster.generate("low tide " * WINDOW, truncate_prompt_tokens=WINDOW)
        await client.end()
        assert str(client.error).startswith(f"text can't fit the window (limit_bytes={WINDOW * LONGEST}, ")
        assert counted(cluster.app, "requests_too_large_total", what="text") == 1


@virtual
async def test_more_ids_than_the_window_holds_are_not_made_text() -> None:
    async with Cluster() as cluster:
        await joined(cluster)
        assert await cluster.app.detokenize([97] * WINDOW) == "a" * WINDOW
        with pytest.raises(InvalidRequest, match=r"limit=1000, value=1001") as refused:
            await cluster.app.detokenize(range(WINDOW + 1))
        assert refused.value.too_large == "token_ids"
        with pytest.raises(InvalidRequest, match="fit the window"):
            await cluster.app.tokenize("a" * (WINDOW * LONGEST + 1))
        assert len(await cluster.app.tokenize("ab " * 2_000)) == 6_000
