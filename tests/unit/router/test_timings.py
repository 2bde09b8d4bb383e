"""Where the time to the first token went, and that the parts add up whoever's word came first."""

from __future__ import annotations

import pytest

from pdserve.messages import (
    Phase,
    Role,
    StartDecode,
    StartPrefill,
)
from pdserve.request import Timings
from pdserve.sampling import FinishReason
from tests.unit.router.conversation import A, B, until_prefill
from tests.unit.router.scripted import DELAY_S, Cluster, hello, virtual

PARTS = ("queue", "reserve", "dispatch", "prefill_queue", "prefill", "relay", "rest")
TRIP_MS = 2 * DELAY_S * 1e3  # both ways, what the two ends add


def check_sum(timings: Timings) -> None:
    assert sum(getattr(timings, f"{name}_ms") for name in PARTS) == pytest.approx(timings.ttft_ms)
    assert all(getattr(timings, f"{name}_ms") >= -1e-6 for name in PARTS)


@virtual
async def test_what_the_prefill_worker_says_is_its_part_and_the_rest_is_the_way() -> None:
    async with Cluster() as cluster:
        p, d = await cluster.pair()
        client, start, prefill = await until_prefill(cluster, p, d, max_tokens=2)
        await cluster.settle(0.5)
        p.first(prefill, A, queue_s=0.2, prefill_s=0.3)
        d.started(start, A, transfer_exposed_s=0.01, commit_s=0.002)
        d.tokens(start, 6, B)
        d.finished(start, 7)
        timings = (await client.end()).finished().timings
        check_sum(timings)
        assert [timings.prefill_queue_ms, timings.prefill_ms] == pytest.approx([200, 300])
        assert timings.rest_ms == pytest.approx(TRIP_MS, abs=1.0)


@virtual
async def test_the_status_tells_the_parts_of_everyone_s_first_token_while_the_request_runs() -> None:
    async with Cluster() as cluster:
        p, d = await cluster.pair()
        client, start, prefill = await until_prefill(cluster, p, d, max_tokens=2)
        assert cluster.app.status(explain=True).placements[-1].timings is None
        await cluster.settle(0.5)
        p.first(prefill, A, queue_s=0.2, prefill_s=0.3)
        d.started(start, A, transfer_exposed_s=0.01, commit_s=0.002)
        await cluster.settle()
        told = cluster.app.status(explain=True).placements[-1].timings
        assert told is not None
        check_sum(told)
        d.tokens(start, 6, B)
        d.finished(start, 7)
        timings = (await client.end()).finished().timings
        assert told.ttft_parts_ms == pytest.approx(timings.ttft_parts_ms)
        assert [told.ttft_ms, told.total_ms] == pytest.approx([timings.ttft_ms, 0.0])


@virtual
async def test_time_between_a_request_s_arrival_and_its_reading_counts_as_queueing() -> None:
    async with Cluster() as cluster:
        p, d = await cluster.pair()
        place = cluster.app.admission.arrive()
        await cluster.advance(3.0)
        client = cluster.generate("hello", place=place, max_tokens=1)
        start = await d.expect(StartDecode)
        d.grant(start)
        p.first(await p.expect(StartPrefill), A, FinishReason.LENGTH, queue_s=0.0, prefill_s=0.0)
        timings = (await client.end()).finished().timings
        check_sum(timings)
        assert timings.queue_ms == pytest.approx(3000, abs=10)
        assert cluster.app.admission.num_places == 0


@virtual
async def test_a_first_token_that_is_late_or_lost_leaves_its_worker_s_part_no_riddle() -> None:
    async with Cluster() as cluster:
        p, d = await cluster.pair()
        client, start, prefill = await until_prefill(cluster, p, d, max_tokens=2)
        await cluster.settle(0.2)
        p.progress(prefill, Phase.PREFILLING, 0)
        await cluster.settle(0.3)
        d.started(start, A, transfer_exposed_s=0.01, commit_s=0.002)
        d.tokens(start, 6, B)
        d.finished(start, 7)
        timings = (await client.end()).finished().timings
        p.first(prefill, A, queue_s=0.2, prefill_s=0.3)  # too late for anybody
        await cluster.settle()
        check_sum(timings)
        assert timings.prefill_queue_ms == pytest.approx(200, abs=5)
        assert timings.prefill_ms == pytest.approx(288, abs=5)
        assert timings.rest_ms < 15  # the hand-off, on the way of this token


@virtual
async def test_a_first_token_behind_the_verdict_still_tells_its_worker_s_part() -> None:
    async with Cluster() as cluster:
        p, d = await cluster.pair()
        client, start, prefill = await until_prefill(cluster, p, d, max_tokens=2)
        await cluster.settle(0.5)
        d.started(start, A)
        await cluster.settle()
        p.first(prefill, A, queue_s=0.2, prefill_s=0.3)
        await cluster.settle()
        d.tokens(start, 6, B)
        d.finished(start, 7)
        timings = (await client.end()).finished().timings
        check_sum(timings)
        assert [timings.prefill_queue_ms, timings.prefill_ms] == pytest.approx([200, 300])


@virtual
async def test_a_worker_that_prefills_itself_counts_its_wait_for_blocks_once() -> None:
    async with Cluster() as cluster:
        b = await cluster.join(hello("b0", Role.BOTH))
        client = cluster.generate("hello", max_tokens=1)
        start = await b.expect(StartDecode)
        await cluster.settle(0.4)  # read, and no blocks yet
        b.grant(start)
        await cluster.settle(0.2)
        b.started(start, A, queue_s=0.4, prefill_s=0.2)
        b.finished(start, 6, FinishReason.LENGTH)
        timings = (await client.end()).finished().timings
        check_sum(timings)
        assert timings.reserve_ms == 0
        assert [timings.prefill_queue_ms, timings.prefill_ms] == pytest.approx([400, 200])
        assert timings.rest_ms == pytest.approx(TRIP_MS, abs=2.0)
        assert not b.got(StartPrefill)
