"""A real collector decodes what a router and two workers export: one trace, the right parents, times that add up."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import closing
from pathlib import Path
from random import Random

import grpc.aio
import pytest

from pdserve.client import AsyncClient
from pdserve.request import Finished, Tokens, event_from_proto
from pdserve.rpc.v1.inference_pb2_grpc import InferenceStub
from tests.support.asking import Question, ask, at_rest
from tests.support.collector import KeptSpans, SeenSpan, rotel_program, running_rotel
from tests.support.singles import Single, Singles
from tests.support.waiting import until

HEARTBEAT_S = 0.1
FLAGS = ("--timeouts.heartbeat-s", f"{HEARTBEAT_S}")
FAKE = ("--engine", "fake", "--engine.num-blocks", "512", "--engine.max-step-tokens", "64")
TRACE_ID, ABOVE = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SERVER, CLIENT = 2, 3
PROGRAM = rotel_program()

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="rotel has no build for this platform")


@pytest.fixture
async def kept() -> AsyncIterator[KeptSpans]:
    spans = KeptSpans()
    yield spans
    spans.close()


async def generate(
    address: str,
    question: Question,
    flags: str,
    trace_id: str = TRACE_ID,
    on_tokens: Callable[[], None] = lambda: None,
) -> Finished:
    """The closing event; the call has a traceparent with these flags."""
    finished: Finished | None = None
    metadata = (("traceparent", f"00-{trace_id}-{ABOVE}-{flags}"),)
    async with grpc.aio.insecure_channel(address) as channel:
        async for message in InferenceStub(channel).Generate(question.request.to_proto(), metadata=metadata):
            match event_from_proto(message):
                case Tokens():
                    on_tokens()
                case Finished() as finished:
                    pass
    assert finished is not None
    return finished


def named(spans: list[SeenSpan], service: str, name: str) -> SeenSpan:
    [found] = [span for span in spans if span.service == service and span.name == name]
    return found


async def test_one_trace_over_three_processes(tmp_path: Path, kept: KeptSpans) -> None:
    assert PROGRAM is not None
    with (
        running_rotel(PROGRAM, tmp_path, kept.port) as endpoint,
        Singles(tmp_path, *FLAGS, "--tracing.endpoint", endpoint, "--tracing.sample-ratio", "0") as cluster,
    ):
        router = cluster.router("r0")
        for role, name in (("prefill", "p0"), ("decode", "d0")):
            cluster.worker(role, name, *FAKE)
        cluster.start()
        question = Question.draw(Random(1), 300, 40)
        async with AsyncClient(router.address) as client:
            await at_rest(client, ["d0", "p0"], heartbeat_s=HEARTBEAT_S)
            await generate(router.address, Question.draw(Random(2), 100, 10), "00", "1" * 32)  # not sampled
            await ask(client, Question.draw(Random(3), 100, 10))  # nor this: its router decides, by 0
            finished = await generate(router.address, question, "01")
            spans = await kept.trace(TRACE_ID, 12)

            async def all_taken() -> bool:
                each = [await one.metric("pdserve_spans_exported_total") for one in cluster.all.values()]
                return sum(each) == len(spans)

            await until("all are counted", all_taken)
        codes = [single.terminate() for single in (router, *cluster.workers)]
    assert codes == [0, 0, 0]
    assert len(spans) == len(kept.spans) == 12, "only the sampled one"

    request = named(spans, "pdserve-router", "text_completion fake")
    queue, attempt = named(spans, "pdserve-router", "queue"), named(spans, "pdserve-router", "attempt")
    reserve, relay = named(spans, "pdserve-router", "reserve"), named(spans, "pdserve-router", "relay")
    asked = named(spans, "pdserve-router", "prefill")
    assert request.parent_id == ABOVE and request.kind == SERVER and asked.kind == CLIENT
    assert {queue.parent_id, attempt.parent_id, relay.parent_id} == {request.span_id}
    assert {reserve.parent_id, asked.parent_id} == {attempt.span_id}
    below = {(span.instance, span.name): span for span in spans if span.service == "pdserve-worker"}
    assert {name: span.parent_id for name, span in below.items()} == {
        ("p0", "queue"): asked.span_id,
        ("p0", "prefill"): asked.span_id,
        ("p0", "hand_off"): asked.span_id,
        ("d0", "wait_for_blocks"): attempt.span_id,
        ("d0", "transfer"): attempt.span_id,
        ("d0", "decode"): attempt.span_id,
    }

    timings = finished.timings  # what the client is told
    parts_s = queue.took_s + reserve.took_s + asked.took_s + relay.took_s
    assert parts_s == pytest.approx(timings.ttft_ms / 1e3, abs=0.002)
    on_p_s = below["p0", "queue"].took_s + below["p0", "prefill"].took_s
    assert on_p_s + (timings.rest_ms + timings.dispatch_ms) / 1e3 == pytest.approx(asked.took_s, abs=0.002)
    assert below["p0", "prefill"].took_s == pytest.approx(timings.prefill_ms / 1e3, abs=0.002)

    chunks = below["p0", "prefill"].events
    assert [name for name, _ in chunks] == ["chunk"] * 5, "300 tokens, 64 at a time"
    assert below["p0", "prefill"].attributes["pdserve.chunks"] == 5
    assert below["d0", "transfer"].attributes["pdserve.kv.bytes"] == finished.kv_bytes > 0
    assert below["p0", "hand_off"].attributes["pdserve.kv.blocks"] == 19
    assert attempt.attributes["pdserve.prefill.worker"] == "p0"
    assert attempt.attributes["pdserve.decode.worker"] == "d0"
    assert request.attributes["gen_ai.usage.input_tokens"] == 300
    assert request.attributes["gen_ai.usage.output_tokens"] == 40
    assert request.attributes["gen_ai.response.finish_reasons"] == ["length"]
    assert not any(span.is_error for span in spans)


async def test_a_replay_links_to_the_attempt_that_failed(tmp_path: Path, kept: KeptSpans) -> None:
    endpoint = f"http://127.0.0.1:{kept.port}"
    with Singles(tmp_path, *FLAGS, "--tracing.endpoint", endpoint) as cluster:
        router = cluster.router("r0")
        cluster.worker("prefill", "p0", *FAKE)
        decodes = {
            name: cluster.worker("decode", name, *FAKE, "--engine.fake-step-s", "0.01")
            for name in ("d0", "d1")
        }
        cluster.start()
        async with AsyncClient(router.address) as client:
            await at_rest(client, ["d0", "d1", "p0"], heartbeat_s=HEARTBEAT_S)
            status = asyncio.create_task(generate(router.address, Question.draw(Random(4), 100, 200), "01"))
            running = await until("one decodes", lambda: busy(decodes))
            decodes[running].kill()
            finished = await status
            spans = await kept.trace(TRACE_ID, 16)
    assert finished.decode_worker != running
    first, second = [span for span in spans if span.name == "attempt"]
    assert first.is_error and first.message.startswith("WorkerLost: ")
    assert first.attributes["error.type"] == "WorkerLost"
    assert not second.is_error and second.links == (first.span_id,)
    waits = [span for span in spans if span.name == "queue" and span.service == "pdserve-router"]
    assert waits[1].begin_s == pytest.approx(first.end_s, abs=1e-6)
    [request] = [span for span in spans if span.name.startswith("text_completion")]
    assert not request.is_error and request.attributes["gen_ai.usage.output_tokens"] == 200


async def busy(workers: Mapping[str, Single]) -> str:
    """The one that has a sequence in its batch, or ""."""
    for name, worker in workers.items():
        if await worker.metric("pdserve_running_sequences"):
            return name
    return ""


async def test_collectors_that_are_away_slow_or_refuse_cost_a_warning(tmp_path: Path) -> None:
    """The router's is away, the prefill worker's never answers, the decode worker's is none of OTLP."""
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        closing(socket.socket()) as bound,
        Singles(tmp_path, *FLAGS) as cluster,
    ):
        bound.bind(("127.0.0.1", 0))  # nobody listens there, nor can anybody else
        router = cluster.router("r0", "--tracing.endpoint", f"http://127.0.0.1:{bound.getsockname()[1]}")
        others = {
            "p0": f"http://127.0.0.1:{silent.getsockname()[1]}",
            "d0": f"http://{router.address}",
        }
        for role, name in (("prefill", "p0"), ("decode", "d0")):
            cluster.worker(role, name, *FAKE, "--tracing.endpoint", others[name])
        cluster.start()
        async with AsyncClient(router.address) as client:
            await at_rest(client, ["d0", "p0"], heartbeat_s=HEARTBEAT_S)
            await ask(client, Question.draw(Random(5), 100, 10))
            for single in cluster.all.values():
                await until("the warning", lambda single=single: warned(single.log))  # type: ignore[misc]
            for number in range(5):
                await ask(client, Question.draw(Random(number), 100, 10))
            await at_rest(client, ["d0", "p0"], heartbeat_s=HEARTBEAT_S)
            dropped = await cluster.all["d0"].metric("pdserve_spans_dropped_total", reason="refused")
        codes = [single.terminate() for single in (router, *cluster.workers)]
    assert codes == [0, 0, 0]
    assert dropped
    for single in cluster.all.values():
        assert len(await warned(single.log)) == 1, single.id


async def warned(log: Path) -> list[str]:
    """Its warnings of spans that aren't taken."""
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    return [line["reason"] for line in lines if line["event"] == "tracing.not_taken"]
