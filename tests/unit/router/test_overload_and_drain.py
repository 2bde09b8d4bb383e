"""Rows 19 and 23 of failures.md: no room, and no new work."""

from __future__ import annotations

import asyncio

import pytest

from pdserve.errors import (
    Draining,
    Overloaded,
)
from pdserve.messages import Credits, StartDecode, StartPrefill
from pdserve.sampling import FinishReason
from tests.unit.router.conversation import A, B, C, until_running
from tests.unit.router.scripted import Cluster, config, load, virtual

# --- row 19: overload


@virtual
async def test_a_full_queue_refuses_at_once_with_retry_after_and_no_worker_s_fault() -> None:
    async with Cluster(config({"max_queued_requests": 2})) as cluster:
        p, d = await cluster.pair()
        p.say(Credits(0))
        await cluster.settle()
        waiting = [cluster.generate("hello", max_tokens=1) for _ in range(2)]
        await cluster.settle()
        begun_s = cluster.clock.now_s()
        with pytest.raises(Overloaded) as refused:
            cluster.generate("hello")
        assert refused.value.retry_after_s > 0
        assert cluster.clock.now_s() == begun_s
        assert cluster.app.admission.num_places == 2
        p.say(Credits(100))
        for _ in waiting:
            start = await d.expect(StartDecode)
            d.grant(start)
            p.first(await p.expect(StartPrefill), A, FinishReason.LENGTH)
        for client in waiting:
            await client.end()
            assert client.error is None


@virtual
async def test_what_has_its_pair_takes_no_place_in_the_queue() -> None:
    async with Cluster(config({"max_queued_requests": 1})) as cluster:
        p, d = await cluster.pair()
        for _ in range(3):
            await until_running(cluster, p, d, max_tokens=50)
        assert len(d.got(StartDecode)) == 3


@virtual
async def test_after_a_refusal_a_decode_worker_is_asked_again_only_after_its_next_load_report() -> None:
    async with Cluster() as cluster:
        p, d = await cluster.pair()
        d1 = await cluster.decode("d1")
        await cluster.link(p, d1)
        client = cluster.generate("hello", max_tokens=1)
        await cluster.settle()
        first, second = (d, d1) if d.got(StartDecode) else (d1, d)
        first.refuse(await first.expect(StartDecode), Overloaded("no room"))
        second.refuse(await second.expect(StartDecode), Overloaded("no room"))
        await cluster.settle(0.2)
        assert len(d.got(StartDecode)) + len(d1.got(StartDecode)) == 2
        first.say(load())
        await first.expect(StartDecode)
        client.generation.close()


# --- row 23: drain


@virtual
async def test_a_refused_request_keeps_its_age_in_the_queue_and_its_priority_at_the_decode_worker() -> None:
    async with Cluster() as cluster:
        p, d = await cluster.pair()
        p.say(Credits(1))
        await cluster.settle()
        first = cluster.generate("first", priority=3)
        start = await d.expect(StartDecode)
        assert start.priority == 3
        await cluster.advance(0.1)
        second = cluster.generate("later", priority=3)
        d.refuse(start, Overloaded("full"))
        await cluster.settle()
        d.say(load())
        again = await d.expect(StartDecode)
        assert again.token_ids == start.token_ids and again.priority == 3
        first.generation.close()
        second.generation.close()


@virtual
async def test_a_draining_decode_worker_gets_no_new_work_and_its_rest_is_replayed_elsewhere() -> None:
    async with Cluster() as cluster:
        p, d = await cluster.pair()
        client, start = await until_running(cluster, p, d, max_tokens=3)
        d1 = await cluster.decode("d1")
        await cluster.link(p, d1)
        d.say(load(draining=True))
        await cluster.settle()
        new = cluster.generate("new")
        await d1.expect(StartDecode)
        d.fail(start, Draining("drain_s is over"))
        again = await d1.expect(StartDecode)
        assert again.token_ids == (*b"hello", A, B) and len(d.got(StartDecode)) == 1
        d1.grant(again)
        await p.expect(StartPrefill)
        client.generation.close()
        new.generation.close()


@virtual
async def test_a_draining_router_serves_what_runs_and_ends_the_rest_with_resume_data() -> None:
    async with Cluster(config(drain_s=5.0)) as cluster:
        p, d = await cluster.pair()
        client, start = await until_running(cluster, p, d, max_tokens=3, seed=42)
        long, _ = await until_running(cluster, p, d, max_tokens=500, seed=43)
        p.say(Credits(0))
        await cluster.settle()
        waiting = cluster.generate("waits")
        await cluster.settle()
        drain = asyncio.create_task(cluster.app.drain())
        await waiting.end()
        assert isinstance(waiting.error, Draining)
        with pytest.raises(Draining):
            cluster.generate("new")
        d.tokens(start, 7, C)
        d.finished(start, 8)
        await client.end()
        assert client.error is None and not cluster.app.ready
        await cluster.advance(5.5)
        await drain
        await long.end()
        assert isinstance(long.error, Draining)
        assert long.error.fields["seed"] == 43 and long.error.fields["num_tokens"] == "2"


@virtual
async def test_a_draining_router_also_serves_what_waits_for_another_attempt() -> None:
    async with Cluster() as cluster:
        p, d = await cluster.pair()
        client, _ = await until_running(cluster, p, d, max_tokens=3)
        d.die()
        await cluster.settle()
        drain = asyncio.create_task(cluster.app.drain())
        await cluster.settle()
        assert not client.done
        again = await cluster.decode("d1")
        await cluster.link(p, again)
        again.grant(await again.expect(StartDecode))
        p.first(await p.expect(StartPrefill), C, FinishReason.LENGTH)
        await client.end()
        assert client.ids() == [A, B, C] and client.error is None
        await drain


@virtual
async def test_a_prefill_worker_that_gives_up_draining_leaves_its_decode_worker_in_use() -> None:
    async with Cluster() as cluster:
        p, d = await cluster.pair()
        client = cluster.generate("hello", max_tokens=1)
        start = await d.expect(StartDecode)
        d.grant(start)
        await p.expect(StartPrefill)
        d.fail(start, Draining("the worker is draining"))  # the error of P's WITHDRAW, passed on
        d.grant(await d.expect(StartDecode))
        p.first(await p.expect(StartPrefill), A, FinishReason.LENGTH)
        await client.end()
        assert client.error is None
