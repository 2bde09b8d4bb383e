"""Gateways in front of two routers: HTTP clients don't notice that one of them is lost."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest

from pdserve.client import AsyncClient
from pdserve.request import GenerateRequest
from pdserve.sampling import SamplingParams
from tests.support.asking import at_rest
from tests.support.http_calls import call, stream
from tests.support.singles import Singles
from tests.support.waiting import until

HEARTBEAT_S = 0.1
# Slow enough that no stream is through when half of them have begun.
FAKE = ("--engine", "fake", "--engine.num-blocks", "8192", "--engine.fake-step-s", "0.005")
WORKERS = ["p0", "d0", "d1"]
NUM_STREAMS = 50
NUM_TOKENS = 400


@dataclass(frozen=True, slots=True)
class Streamed:
    """What came of one stream."""

    text: str
    reason: str
    usage: dict[str, Any]
    is_done: bool


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Singles]:
    """Two routers that share three workers, and a gateway in front of them."""
    with Singles(tmp_path_factory.mktemp("gateway"), "--timeouts.heartbeat-s", f"{HEARTBEAT_S}") as made:
        made.router("r0")
        made.router("r1")
        made.worker("prefill", "p0", *FAKE)
        made.worker("decode", "d0", *FAKE)
        made.worker("decode", "d1", *FAKE)
        made.gateway("g0", "--timeouts.drain-s", "30")
        yield made.start()


def body_of(prompt: list[int], seed: int) -> dict[str, Any]:
    return {
        "prompt": prompt, "seed": seed, "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip


async def read(address: str, body: dict[str, Any], has_begun: asyncio.Semaphore) -> Streamed:
    """All of one stream; releases at its first part with text, when nearly all is still to come."""
    texts: list[str] = []
    usage: dict[str, Any] = {}
    reason, is_done, has_text = "", False, False
    async with stream(address, "/v1/completions", body) as opened:
        assert opened.status == 200
        async for event in opened.events():
            if event == "[DONE]":
                is_done = True
                continue
            assert "error" not in event, event
            usage = event["usage"] or usage
            for choice in event["choices"]:
                texts.append(choice["text"])
                reason = choice["finish_reason"] or reason
            if not has_text and any(texts):
                has_text = True
                has_begun.release()
    return Streamed("".join(texts), reason, usage, is_done)


async def test_fifty_streams_are_whole_although_their_router_was_killed(cluster: Singles) -> None:
    r0, r1 = cluster.routers
    gateway = cluster.all["g0"]
    random = Random("gateway")
    prompts = [[random.randrange(256) for _ in range(random.randrange(20, 200))] for _ in range(NUM_STREAMS)]
    async with AsyncClient(r0.address) as first, AsyncClient(r1.address) as second:
        for client in (first, second):
            await at_rest(client, WORKERS, heartbeat_s=HEARTBEAT_S)
        await gateway.ready()
        has_begun = asyncio.Semaphore(0)
        streams = [
            asyncio.create_task(read(gateway.address, body_of(prompt, seed), has_begun))
            for seed, prompt in enumerate(prompts, 1)
        ]
        for _ in range(NUM_STREAMS // 2):
            await has_begun.acquire()
        assert not all(each.done() for each in streams)
        r0.kill()
        answers = [await each for each in streams]
        assert await r1.metric("pdserve_requests_total") > 0, "nobody had to go on at the other router"
        sampling = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
        asked = [
            GenerateRequest(input=tuple(prompt), seed=seed, sampling=sampling)
            for seed, prompt in enumerate(prompts, 1)
        ]
        wanted = await asyncio.gather(*(second.generate_text(each) for each in asked))
        for prompt, answer, want in zip(prompts, answers, wanted, strict=True):
            assert (answer.text, answer.reason, answer.is_done) == (want.text, "length", True)
            num_tokens = (answer.usage["prompt_tokens"], answer.usage["completion_tokens"])
            assert num_tokens == (len(prompt), NUM_TOKENS)
        await at_rest(second, WORKERS, heartbeat_s=HEARTBEAT_S)
        r0.start()
        await at_rest(first, WORKERS, heartbeat_s=HEARTBEAT_S)


async def test_a_gateway_without_routers_says_so_and_serves_again_when_they_are_back(
    cluster: Singles,
) -> None:
    gateway = cluster.all["g0"]
    await gateway.ready()
    for router in cluster.routers:
        router.kill()
    refused = await call(gateway.address, "/v1/completions", {"prompt": "x"})
    assert (refused.status, refused.error["type"]) == (503, "server_error")

    async def health(status: int) -> bool:
        return (await call(gateway.address, "/health")).status == status

    await until("the gateway isn't ready", lambda: health(503), told=gateway.log_tail)
    cluster.start()
    await until("it is again", lambda: health(200), told=cluster.log_tails)
    assert (await call(gateway.address, "/v1/completions", {"prompt": "x"})).status == 200


async def test_a_draining_gateway_ends_its_streams_first(cluster: Singles, tmp_path: Path) -> None:
    gateway = cluster.all["g0"]
    await gateway.ready()
    has_begun = asyncio.Semaphore(0)
    streaming = asyncio.create_task(read(gateway.address, body_of([1, 2, 3], 1), has_begun))
    await has_begun.acquire()
    assert not streaming.done()
    gateway.send(signal.SIGTERM)
    answer = await streaming
    assert (answer.reason, answer.is_done) == ("length", True)
    assert await asyncio.to_thread(gateway.wait) == 0
    gateway.start()
    await gateway.ready()
