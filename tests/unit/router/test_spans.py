"""The router's spans of a request: they add up, tell workers where theirs belong, and show how it ended."""

from __future__ import annotations

import random

import pytest

from pdserve.errors import NoWorker, WorkerLost
from pdserve.messages import StartDecode, StartPrefill
from pdserve.tracing import SpanKind, Trace, Tracer, TraceSpan
from tests.unit.router.conversation import A, B, serve, until_prefill, until_running
from tests.unit.router.scripted import Cluster, config, virtual

ABOVE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Spans:
    """Of all requests of one test, as its router gives them away."""

    def __init__(self) -> None:
        self.all: list[TraceSpan] = []
        self.tracer = Tracer(self.all.extend, random.Random(3), 0.0)

    def named(self, name: str) -> list[TraceSpan]:
        return [span for span in self.all if span.name == name]

    def one(self, name: str) -> TraceSpan:
        [span] = self.named(name)
        return span

    @property
    def request(self) -> TraceSpan:
        [span] = [span for span in self.all if span.kind is SpanKind.SERVER]
        return span

    def place(self, traceparent: str) -> Trace:
        """What a worker makes of what it was told."""
        place = self.tracer.join(traceparent)
        assert place is not None
        return place


@virtual
async def test_parts_add_up_and_workers_are_told_where_theirs_belong() -> None:
    spans = Spans()
    async with Cluster(tracer=spans.tracer) as cluster:
        p, d = await cluster.pair()
        client, start, prefill = await until_prefill(cluster, p, d, max_tokens=2, traceparent=ABOVE)
        await cluster.settle(0.5)
        p.first(prefill, A, queue_s=0.2, prefill_s=0.3)
        d.started(start, A)
        d.tokens(start, 6, B)
        d.finished(start, 7)
        ttft_s = (await client.end()).finished().timings.ttft_ms / 1e3
    parts = [spans.one(name) for name in ("queue", "reserve", "prefill", "relay")]
    assert sum(part.end_s - part.begin_s for part in parts) == pytest.approx(ttft_s)
    assert [left.end_s for left in parts[:-1]] == [right.begin_s for right in parts[1:]], "without a gap"
    request, attempt = spans.request, spans.one("attempt")
    assert (request.parent_id, request.kind) == (0xB7AD6B7169203331, SpanKind.SERVER)
    assert {span.trace_id for span in spans.all} == {0x0AF7651916CD43DD8448EB211C80319C}
    assert spans.place(start.name.traceparent).span_id == attempt.span_id
    assert spans.place(prefill.name.traceparent).span_id == spans.one("prefill").span_id
    assert spans.one("prefill").kind is SpanKind.CLIENT and not attempt.error
    assert request.attributes["gen_ai.usage.output_tokens"] == 2
    assert request.attributes["gen_ai.response.finish_reasons"] == ("length",)


@virtual
async def test_what_is_not_sampled_leaves_nothing_and_its_traceparent_as_it_is() -> None:
    spans = Spans()
    async with Cluster(tracer=spans.tracer) as cluster:
        p, d = await cluster.pair()
        for traceparent in ("", ABOVE[:-2] + "00"):
            client = cluster.generate("hello", max_tokens=1, traceparent=traceparent)
            start = await serve(p, d, A)
            await client.end()
            assert start.name.traceparent == traceparent
    assert not spans.all


@virtual
async def test_one_that_finds_no_worker_waited_in_the_queue() -> None:
    spans = Spans()
    async with Cluster(config(worker_wait_s=2.0), tracer=spans.tracer) as cluster:
        p, _ = await cluster.pair()
        d_only = cluster.workers[1]
        d_only.die()
        await cluster.settle()
        client = cluster.generate("hello", traceparent=ABOVE)
        await cluster.advance(3.0)
        assert isinstance((await client.end()).error, NoWorker)
        assert not p.got(StartPrefill)
    request, queue = spans.request, spans.one("queue")
    assert request.error == queue.error and request.error.startswith("NoWorker")
    assert queue.end_s - queue.begin_s == pytest.approx(2.0, abs=0.1)
    assert request.attributes["pdserve.status"] == "UNAVAILABLE" and not spans.named("attempt")


@virtual
async def test_a_client_that_leaves_is_no_error_of_the_attempt() -> None:
    spans = Spans()
    async with Cluster(tracer=spans.tracer) as cluster:
        p, d = await cluster.pair()
        client, _ = await until_running(cluster, p, d, traceparent=ABOVE)
        client.generation.close()
        await cluster.settle()
    assert spans.request.error.startswith("RequestCancelled")
    attempt = spans.one("attempt")
    assert not attempt.error and attempt.end_s == pytest.approx(spans.request.end_s, abs=0.01)
    assert not [span for span in spans.named("queue") if span.error]


@virtual
async def test_each_attempt_has_its_own_and_links_to_the_one_before() -> None:
    spans = Spans()
    async with Cluster(tracer=spans.tracer) as cluster:
        p, d = await cluster.pair()
        client, first = await until_running(cluster, p, d, traceparent=ABOVE, max_tokens=3)
        other = await cluster.decode("d1")
        await cluster.link(p, other)
        d.die()
        second = await other.expect(StartDecode)
        other.grant(second)
        again = await p.expect(StartPrefill)
        p.first(again, 99)
        other.started(second, 99)
        other.finished(second, len(second.token_ids) + 1)
        await client.end()
    before, after = spans.named("attempt")
    assert before.error.startswith("WorkerLost") and not after.error
    assert (before.links, after.links) == ((), (before.span_id,))
    waits = spans.named("queue")
    assert waits[1].begin_s == before.end_s and waits[1].end_s == after.begin_s
    assert spans.place(first.name.traceparent).span_id == before.span_id
    assert spans.place(second.name.traceparent).span_id == after.span_id
    assert after.attributes["pdserve.decode.worker"] == "d1"
    assert not spans.request.error


@virtual
async def test_the_last_attempts_error_ends_it_and_nothing_waits_any_longer() -> None:
    spans = Spans()
    async with Cluster(config({"max_attempts": 1}), tracer=spans.tracer) as cluster:
        p, d = await cluster.pair()
        client, _ = await until_running(cluster, p, d, traceparent=ABOVE)
        d.die()
        assert isinstance((await client.end()).error, WorkerLost)
    assert spans.one("attempt").error.startswith("WorkerLost")
    assert spans.request.error.startswith("WorkerLost") and not spans.one("queue").error
