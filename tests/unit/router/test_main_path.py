"""One request on one pair: the order of the messages, the stream, and what its end frees."""

from __future__ import annotations

import pytest

from pdserve.messages import (
    Abort,
    Phase,
    Role,
    StartDecode,
    StartPrefill,
)
from pdserve.sampling import FinishReason
from tests.unit.router.scripted import EOS, Cluster, hello, virtual

H, E, L, O = b"HELO"  # noqa: E741


@virtual
async def test_a_request_goes_through_the_pair_and_streams_every_token_once() -> None:
    async with Cluster() as cluster:
        p, d = await cluster.pair()
        client = cluster.generate("hello")
        start = await d.expect(StartDecode)
        assert start.token_ids == tuple(b"hello") and start.num_prompt_tokens == 5
        assert start.source == p.ref and start.key.max_tokens == 4
        assert not p.got(StartPrefill)
        d.grant(start, lease_id=99, cached=0)
        prefill = await p.expect(StartPrefill)
        assert prefill.handle == start.handle and prefill.lease_id == 99
        assert prefill.decode_worker == d.ref and prefill.token_ids == start.token_ids
        p.progress(prefill, Phase.PREFILLING, 5)
        p.first(prefill, H)
        d.started(start, H, received_bytes=640, transport="stream")
        d.tokens(start, 6, E)
        d.tokens(start, 7, L, O)
        d.finished(start, 9)
        await client.end()
        assert client.error is None
        assert client.ids() == [H, E, L, O] and client.text() == "HELO"
        assert client.started.prompt_token_ids == tuple(b"hello") and client.started.seed == start.key.seed
        finished = client.finished()
        assert finished.reason is FinishReason.LENGTH and finished.num_attempts == 1
        assert (finished.prefill_worker, finished.decode_worker) == ("p0", "d0")
        assert finished.kv_bytes == 640 and finished.transport == "stream"
        assert finished.usage.num_prompt_tokens == 5 and finished.usage.num_completion_tokens == 4
        assert not d.got(Abort) and not p.got(Abort)
        counted = cluster.app.status().figures
        assert (counted.num_requests_ended, counted.num_requests_refused, counted.num_requests_failed) == (
            1,
            0,
            0,
        )
        assert (counted.num_prompt_tokens, counted.num_completion_tokens, counted.num_kv_bytes) == (5, 4, 640)
        assert [sum(spread.counts) for spread in (counted.ttft, counted.gap, counted.queued)] == [1, 3, 1]


@virtual
async def test_requests_that_end_badly_are_counted_by_whose_doing_it_was() -> None:
    async with Cluster() as cluster:
        metrics = cluster.app.metrics
        for status in (
            "OK",
            "CANCELLED",
            "INVALID_ARGUMENT",
            "RESOURCE_EXHAUSTED",
            "UNAVAILABLE",
            "INTERNAL",
        ):
            metrics.requests.labels(status=status).inc()
        counted = cluster.app.status().figures
        assert (counted.num_requests_ended, counted.num_requests_refused, counted.num_requests_failed) == (
            6,
            1,
            2,
        )


@virtual
async def test_the_parts_of_the_first_token_time_sum_up() -> None:
    async with Cluster() as cluster:
        p, d = await cluster.pair()
        client = cluster.generate("hello", max_tokens=2)
        start = await d.expect(StartDecode)
        await cluster.settle(0.01)
        d.grant(start)
        prefill = await p.expect(StartPrefill)
        await cluster.settle(0.005)
        p.first(prefill, H)
        d.started(start, H, transfer_exposed_s=0.004, commit_s=0.001)
        d.tokens(start, 6, E)
        d.finished(start, 7)
        await client.end()
        t = client.finished().timings
        parts = (
            t.queue_ms,
            t.reserve_ms,
            t.dispatch_ms,
            t.prefill_queue_ms,
            t.prefill_ms,
            t.relay_ms,
            t.rest_ms,
        )
        assert t.ttft_ms == pytest.approx(sum(parts))
        assert t.queue_ms == 0 and t.dispatch_ms == 0 and t.relay_ms == 0
        assert t.reserve_ms == pytest.approx(12, abs=0.1)  # two ways and the 10 ms that D took
        assert t.prefill_queue_ms == pytest.approx(2) and t.prefill_ms == pytest.approx(3)
        assert t.rest_ms == pytest.approx(2, abs=0.1)
        assert t.transfer_exposed_ms == pytest.approx(4) and t.commit_ms == pytest.approx(1)
        assert t.ttft_ms == pytest.approx(19, abs=0.1) and t.total_ms >= t.ttft_ms


@virtual
async def test_a_final_first_token_ends_the_request_and_aborts_the_lease() -> None:
    async with Cluster() as cluster:
        p, d = await cluster.pair()
        client = cluster.generate("hello", max_tokens=1)
        start = await d.expect(StartDecode)
        d.grant(start)
        p.first(await p.expect(StartPrefill), H, FinishReason.LENGTH, cached=3)
        await client.end()
        assert client.ids() == [H] and client.finished().reason is FinishReason.LENGTH
        assert client.started.num_cached_tokens == 3
        assert (await d.expect(Abort)).handle == start.handle
        assert not p.got(Abort)


@virtual
async def test_an_end_of_sequence_token_is_shown_without_text() -> None:
    async with Cluster() as cluster:
        p, d = await cluster.pair()
        client = cluster.generate("hello")
        start = await d.expect(StartDecode)
        d.grant(start)
        p.first(await p.expect(StartPrefill), H)
        d.started(start, H)
        d.tokens(start, 6, EOS)
        d.finished(start, 7, FinishReason.EOS)
        await client.end()
        assert client.ids() == [H, EOS] and client.text() == "H"
        assert client.finished().reason is FinishReason.EOS


@virtual
async def test_the_first_token_comes_from_whoever_says_it_first_and_only_once() -> None:
    async with Cluster() as cluster:
        p, d = await cluster.pair()
        client = cluster.generate("hello", max_tokens=3)
        start = await d.expect(StartDecode)
        d.grant(start)
        prefill = await p.expect(StartPrefill)
        d.started(start, H)
        await cluster.settle()
        assert client.ids() == [H]
        p.first(prefill, H)
        await cluster.settle()
        d.tokens(start, 6, E, L)
        d.finished(start, 8)
        await client.end()
        assert client.ids() == [H, E, L]
        assert client.finished().timings.prefill_ms == pytest.approx(3)


@virtual
async def test_a_stop_string_ends_both_the_text_and_the_sequence() -> None:
    async with Cluster() as cluster:
        p, d = await cluster.pair()
        client = cluster.generate("hello", max_tokens=100, stop=("LO",))
        start = await d.expect(StartDecode)
        d.grant(start)
        p.first(await p.expect(StartPrefill), H)
        d.started(start, H)
        d.tokens(start, 6, E)
        d.tokens(start, 7, L)
        await cluster.settle()
        assert client.ids() == [H, E]  # "L" may begin the stop string: held back with its id
        d.tokens(start, 8, O, H, H)
        await client.end()
        assert client.ids() == [H, E, L, O] and client.text() == "HE"
        finished = client.finished()
        assert finished.reason is FinishReason.STOP_TEXT and finished.usage.num_completion_tokens == 4
        assert (await d.expect(Abort)).handle == start.handle
        d.tokens(start, 11, H)  # overrun, under a closed handle
        await cluster.settle()


@virtual
async def test_a_worker_alone_prefills_for_itself_where_allowed() -> None:
    async with Cluster() as cluster:
        both = await cluster.join(hello("b0", Role.BOTH))
        client = cluster.generate("hello", max_tokens=2)
        start = await both.expect(StartDecode)
        assert start.source is None
        both.grant(start)
        both.progress(start, Phase.PREFILLING, 5)
        both.started(start, H, queue_s=0.5, prefill_s=0.25)
        both.tokens(start, 6, E)
        both.finished(start, 7)
        await client.end()
        assert client.ids() == [H, E] and client.finished().prefill_worker == ""
        assert client.finished().timings.prefill_ms == pytest.approx(250)
