"""Rows 1, 2, 22 of failures.md: clients that go, ask for the impossible, or don't read."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from pdserve.errors import (
    DeadlineExceeded,
    InvalidRequest,
    RequestCancelled,
    UnknownModel,
    UnknownRequest,
    WorkerLost,
)
from pdserve.messages import Abort, StartDecode, StartPrefill
from pdserve.sampling import FinishReason
from tests.unit.router.conversation import A, B, C, until_prefill, until_running
from tests.unit.router.scripted import Cluster, config, virtual

# --- row 1: the client goes, or its deadline passes


@virtual
async def test_a_client_that_goes_away_stops_both_legs() -> None:
    async with Cluster() as cluster:
        p, d = await cluster.pair()
        client, start, prefill = await until_prefill(cluster, p, d)
        client.generation.close()
        assert (await d.expect(Abort)).handle == start.handle
        assert (await p.expect(Abort)).handle == prefill.handle
        await client.end()


@virtual
async def test_a_client_that_goes_away_in_mid_stream_stops_the_decode_worker_only() -> None:
    async with Cluster() as cluster:
        p, d = await cluster.pair()
        client, start = await until_running(cluster, p, d)
        client.generation.close()
        assert (await d.expect(Abort)).handle == start.handle
        await cluster.settle()
        assert not p.got(Abort)


@virtual
async def test_a_deadline_ends_the_request_wherever_it_is() -> None:
    async with Cluster() as cluster:
        p, d = await cluster.pair()
        client, start, _ = await until_prefill(cluster, p, d, deadline_left_s=2.0)
        assert start.deadline_left_s == pytest.approx(2.0, abs=0.01)
        await client.end()
        assert isinstance(client.error, DeadlineExceeded)
        await cluster.settle()
        assert d.got(Abort) and p.got(Abort)
        waiting = cluster.generate("hello", deadline_left_s=1.0)
        await d.expect(StartDecode)
        await waiting.end()
        assert isinstance(waiting.error, DeadlineExceeded | WorkerLost)


@virtual
async def test_a_deadline_counts_in_the_queue_too() -> None:
    async with Cluster() as cluster:
        client = cluster.generate("hello", deadline_left_s=1.0)
        begun_s = cluster.clock.now_s()
        await client.end()
        assert isinstance(client.error, DeadlineExceeded)
        assert cluster.clock.now_s() - begun_s == pytest.approx(1.0, abs=0.01)


@virtual
async def test_abort_by_id_ends_the_request_and_an_unknown_id_is_an_error() -> None:
    async with Cluster() as cluster:
        p, d = await cluster.pair()
        client, *_ = await until_prefill(cluster, p, d, request_id="mine")
        with pytest.raises(InvalidRequest, match="mine"):
            cluster.generate("again", request_id="mine")
        cluster.app.abort("mine")
        await client.end()
        assert isinstance(client.error, RequestCancelled)
        with pytest.raises(UnknownRequest):
            cluster.app.abort("mine")


# --- row 2: bad requests


@virtual
async def test_a_bad_request_is_refused_before_any_reservation_naming_limit_and_value() -> None:
    async with Cluster() as cluster:
        _, d = await cluster.pair()
        long = cluster.generate("x" * 4000, max_tokens=97)
        await long.end()
        assert isinstance(long.error, InvalidRequest) and long.error.fields["limit"] == 4096
        assert long.error.fields["value"] == 4097
        model = cluster.generate("x", model="other")
        await model.end()
        assert isinstance(model.error, UnknownModel)
        with pytest.raises(InvalidRequest, match=r"outside the vocabulary \(limit=259, value=260\)"):
            cluster.generate((1, 260))
        await cluster.settle()
        assert not d.got(StartDecode)


@virtual
async def test_a_refused_id_is_not_written_to_the_log_as_it_came() -> None:
    async with Cluster() as cluster:
        await cluster.pair()
        with capture_logs() as logs, pytest.raises(InvalidRequest):
            cluster.generate("x", request_id="q\x1b[2Jworker.lost")
    (line,) = [entry for entry in logs if entry["event"] == "request.refused"]
    assert line["request_id"] == ""
    assert line["error"].isprintable()


@virtual
async def test_unset_max_tokens_is_what_is_left_of_the_smallest_window() -> None:
    async with Cluster() as cluster:
        p = await cluster.prefill(window_tokens=100)
        d = await cluster.decode(window_tokens=200)
        await cluster.link(p, d)
        client = cluster.generate("x" * 99, max_tokens=None)
        assert (await d.expect(StartDecode)).key.max_tokens == 1
        full = cluster.generate("x" * 100, max_tokens=None)
        await full.end()
        assert isinstance(full.error, InvalidRequest) and full.error.fields["limit"] == 100
        client.generation.close()


# --- row 22: a slow client


@virtual
async def test_a_slow_client_is_given_up_and_others_are_not_held_up() -> None:
    async with Cluster(config(client_stall_s=3.0)) as cluster:
        p, d = await cluster.pair()
        slow = cluster.generate("hello", max_tokens=50)
        stalled: list[bool] = []
        slow.generation.on_stalled = lambda: stalled.append(True)
        start = await d.expect(StartDecode)
        d.grant(start)
        prefill = await p.expect(StartPrefill)
        slow.pause()
        p.first(prefill, A)
        d.started(start, A)
        for position in range(6, 20):
            d.tokens(start, position, B)
        await cluster.settle()
        quick = cluster.generate("hello", max_tokens=1)
        other = await d.expect(StartDecode)
        d.grant(other)
        p.first(await p.expect(StartPrefill), C, FinishReason.LENGTH)
        await quick.end()
        assert quick.ids() == [C]
        await cluster.advance(3.5)
        assert any(abort.handle == start.handle for abort in d.got(Abort)) and stalled == [True]
        slow.resume()
        await slow.end()
        assert isinstance(slow.error, RequestCancelled)
        assert len(slow.ids()) == 15  # what lay there was one event; nothing is lost, nothing repeated
