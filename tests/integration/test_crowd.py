"""A crowd asks one router at once: each is served, or told when to come back, and the router has counted it.

40,000 are more than gRPC keeps of one connection, and were once more than it kept at all before it turned calls away.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from pdserve.client import AsyncClient
from pdserve.clock import Clock, SystemClock
from pdserve.rpc.v1 import inference_pb2 as pb
from pdserve.rpc.v1.inference_pb2_grpc import InferenceStub
from pdserve.service.rpc_errors import ERROR_KEY, RETRY_AFTER_KEY
from tests.support.asking import at_rest
from tests.support.singles import Single, Singles

HEARTBEAT_S = 0.1
PATIENCE_S = 600.0
FAKE = ("--engine", "fake", "--engine.num-blocks", "512")


@dataclass(frozen=True, slots=True)
class Ended:
    """How one call ended. error: the class that its trailers name; num_tokens and ttft_s by its client."""

    status: str
    error: str = ""
    retry_after_ms: int = 0
    num_tokens: int = 0
    ttft_s: float = 0.0


async def call(stub: Any, number: int, clock: Clock) -> Ended:
    message = pb.GenerateRequest(
        text=f"prompt {number}", sampling=pb.SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    )
    begun_s, ttft_s, num_tokens = clock.now_s(), 0.0, 0
    try:
        async for event in stub.Generate(message, timeout=PATIENCE_S):
            if event.HasField("tokens"):
                ttft_s = ttft_s or clock.now_s() - begun_s
                num_tokens += len(event.tokens.token_ids)
    except grpc.aio.AioRpcError as error:
        metadata: Any = error.trailing_metadata()
        trailers: dict[str, Any] = dict(metadata)
        retry_after = str(trailers.get(RETRY_AFTER_KEY, 0))
        return Ended(error.code().name, str(trailers.get(ERROR_KEY, "")), int(retry_after))
    return Ended("OK", num_tokens=num_tokens, ttft_s=ttft_s)


async def most_places(router: Single, over: asyncio.Event) -> float:
    """The largest value that the gauge of the queue had."""
    most = 0.0
    while not over.is_set():
        most = max(most, await router.metric("pdserve_queue_places"))
    return most


def connection(address: str) -> grpc.aio.Channel:
    """One of its own."""
    return grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("num_calls", "num_connections"), [(4_000, 1), (40_000, 1), (40_000, 10)], ids=["4000", "one", "ten"]
)
async def test_each_of_a_crowd_is_served_or_refused_and_counted(
    num_calls: int, num_connections: int, tmp_path: Path
) -> None:
    with Singles(tmp_path, "--timeouts.heartbeat-s", f"{HEARTBEAT_S}") as cluster:
        router = cluster.router("r0")
        for role, name in (("prefill", "p0"), ("decode", "d0")):
            cluster.worker(role, name, *FAKE)
        cluster.start()
        over = asyncio.Event()
        async with AsyncClient(router.address) as client, asyncio.TaskGroup() as group:
            await at_rest(client, ["d0", "p0"], heartbeat_s=HEARTBEAT_S)
            watching = group.create_task(most_places(router, over))
            async with AsyncExitStack() as open_channels:
                stubs = [
                    InferenceStub(await open_channels.enter_async_context(connection(router.address)))
                    for _ in range(num_connections)
                ]
                clock = SystemClock()
                ended = await asyncio.gather(
                    *(call(stubs[number % num_connections], number, clock) for number in range(num_calls))
                )
            over.set()
            await at_rest(client, ["d0", "p0"], heartbeat_s=HEARTBEAT_S)
        status = Counter(each.status for each in ended)
        assert set(status) == {"OK", "RESOURCE_EXHAUSTED"}, (status, cluster.log_tails())
        for each in ended:
            if each.status == "OK":
                assert each.num_tokens == 4
            else:
                assert each.error == "Overloaded"
                assert each.retry_after_ms > 0
        told = {code: await router.metric("pdserve_requests_total", status=code) for code in status}
        assert told == status
        assert await router.metric("pdserve_requests_total") == num_calls
        assert await router.metric("pdserve_queue_refused_total") == status["RESOURCE_EXHAUSTED"]
        assert await router.metric("pdserve_ttft_seconds_count") == status["OK"]
        limit = 1024
        assert watching.result() > limit / 2  # what waits is seen to wait …
        assert await router.metric("pdserve_queue_places") == 0
        clients_s = sum(each.ttft_s for each in ended)
        told_s = await router.metric("pdserve_ttft_seconds_sum")
        print(
            f"{status}, mean TTFT: clients {clients_s / status['OK']:.2f} s, router {told_s / status['OK']:.2f} s"
        )
