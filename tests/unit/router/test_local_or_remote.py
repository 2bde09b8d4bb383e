"""Conditional disaggregation: whether a worker that can prefill itself does, or a prefill worker does it for a pair."""

from __future__ import annotations

from typing import Any

from pdserve.messages import (
    PairState,
    Role,
    StartDecode,
    StartPrefill,
)
from pdserve.sampling import FinishReason
from tests.unit.router.scripted import Cluster, ScriptedWorker, config, hello, load, virtual

A = 97


async def choose(cluster: Cluster, num_tokens: int, **fields: Any) -> bool:
    """Whether a prompt of so many tokens goes to a prefill worker; it is taken back at once."""
    await cluster.settle()
    before = {worker: len(worker.got(StartDecode)) for worker in cluster.workers}
    client = cluster.generate(tuple([65] * num_tokens), cache_salt=f"{cluster.clock.now_s()}", **fields)
    await cluster.settle()
    (start,) = [
        start for worker in cluster.workers for start in worker.got(StartDecode)[before.get(worker, 0) :]
    ]
    client.generation.close()
    await cluster.settle()
    return start.source is not None


async def both_and_pair(cluster: Cluster) -> tuple[ScriptedWorker, ScriptedWorker]:
    """A pair whose decode worker may also prefill itself."""
    p = await cluster.prefill()
    b = await cluster.join(hello("b0", Role.BOTH))
    await cluster.link(p, b)
    return p, b


@virtual
async def test_beside_an_idle_engine_a_short_prompt_stays_local_however_fast_the_prefill_worker() -> None:
    async with Cluster() as cluster:
        p, _ = await both_and_pair(cluster)
        assert not await choose(cluster, 100)
        p.say(load(prefill_tokens_per_s=990.0))
        assert not await choose(cluster, 1000)


@virtual
async def test_a_prefill_worker_that_is_faster_by_more_than_the_way_gets_it() -> None:
    async with Cluster() as cluster:
        p, _ = await both_and_pair(cluster)
        p.say(load(prefill_tokens_per_s=4000.0))
        assert await choose(cluster, 1000)
        p.say(load(prefill_tokens_per_s=4000.0, num_queued_tokens=8000))
        assert not await choose(cluster, 1000)  # by then it would be done here


@virtual
async def test_running_streams_that_a_local_prefill_would_delay_count() -> None:
    async with Cluster() as cluster:
        p, b = await both_and_pair(cluster)
        b.say(load(num_running=6))
        assert await choose(cluster, 300)
        p.say(load(num_queued_tokens=20_000, num_queued_short_tokens=20_000))
        assert not await choose(cluster, 300)
        b.say(load(num_running=200))
        assert await choose(cluster, 300)


@virtual
async def test_a_prompt_of_the_configured_size_goes_to_a_prefill_worker_whatever_the_estimate() -> None:
    async with Cluster(config({"remote_prefill_tokens": 500})) as cluster:
        p, b = await both_and_pair(cluster)
        p.say(load(num_queued_tokens=50_000, num_queued_short_tokens=50_000))
        assert not await choose(cluster, 499)
        assert await choose(cluster, 500)
        (explained,) = [
            each
            for each in cluster.app.explanations
            if len(each.verdicts) == 2 and each.verdicts[-1].cost is None
        ]
        assert explained.verdicts[-1].reason == "500 tokens to prefill: for a prefill worker"
        p.die()
        await cluster.settle()
        assert not await choose(cluster, 500)  # where there is one
        assert b.ref.id == "b0"


@virtual
async def test_decode_workers_do_it_only_where_that_is_allowed() -> None:
    async with Cluster() as cluster:
        p, _ = await cluster.pair()
        p.say(load(num_queued_tokens=50_000, num_queued_short_tokens=50_000))
        assert await choose(cluster, 10)
    async with Cluster(config({"allow_local_prefill": True})) as cluster:
        p, _ = await cluster.pair()
        p.say(load(num_queued_tokens=50_000, num_queued_short_tokens=50_000))
        assert not await choose(cluster, 10)


async def choose_after(
    cluster: Cluster,
    p: ScriptedWorker,
    b: ScriptedWorker,
    num_served: int,
    *,
    prefill_s: float,
    exposed_s: float = 0.0,
) -> bool:
    """As `choose`, after so many prompts at most were served by the pair, each in this time."""
    for n in range(num_served):
        if not await choose(cluster, 1000):
            return False
        b.skip()
        client = cluster.generate(tuple([65] * 1000), cache_salt=str(n), max_tokens=2)
        start = await b.expect(StartDecode)
        b.grant(start)
        p.skip()
        p.first(await p.expect(StartPrefill), A, prefill_s=prefill_s, queue_s=0.0)
        b.started(start, A, transfer_exposed_s=exposed_s)
        b.tokens(start, 1001, A)
        b.finished(start, 1002)
        await client.end()
        b.say(load())
    return await choose(cluster, 1000)


@virtual
async def test_what_is_observed_weighs_more_than_what_was_reported() -> None:
    """The prefill worker says that it is fast; a few prompts later the router knows better."""
    async with Cluster() as cluster:
        p, b = await both_and_pair(cluster)
        p.say(load(prefill_tokens_per_s=4000.0))
        await cluster.settle()
        assert await choose(cluster, 1000)
        assert not await choose_after(cluster, p, b, 4, prefill_s=3.0)


@virtual
async def test_a_link_that_turns_out_slow_counts() -> None:
    async with Cluster() as cluster:
        p, b = await both_and_pair(cluster)
        p.say(load(prefill_tokens_per_s=2000.0))
        await cluster.settle()
        assert await choose(cluster, 1000)
        assert not await choose_after(cluster, p, b, 8, prefill_s=0.5, exposed_s=2.0)


@virtual
async def test_a_local_prefill_s_own_timings_are_learnt_too() -> None:
    async with Cluster() as cluster:
        p, b = await both_and_pair(cluster)
        p.say(load(prefill_tokens_per_s=900.0))
        await cluster.settle()
        assert not await choose(cluster, 1000)
        b.skip()
        for n in range(3):
            client = cluster.generate(tuple([65] * 1000), cache_salt=str(n), max_tokens=1)
            start = await b.expect(StartDecode)
            b.grant(start)
            b.started(start, A, queue_s=0.0, prefill_s=4.0)
            b.finished(start, len(start.token_ids) + 1, FinishReason.LENGTH)
            await client.end()
            b.say(load())
            await cluster.settle()
        assert await choose(cluster, 1000)


@virtual
async def test_a_worker_that_fits_no_prefill_worker_gets_nothing_not_even_alone() -> None:
    async with Cluster(config({"allow_local_prefill": True})) as cluster:
        p, d = await cluster.pair()
        stranger = await cluster.join(hello("x0", Role.BOTH, block_size=32))
        d.say(load(num_running=100_000))
        p.say(load(num_queued_tokens=50_000, num_queued_short_tokens=50_000))
        assert await choose(cluster, 10)  # nobody knows yet whether it fits
        p.say(
            PairState(
                stranger.ref, False, reason="misfit: layout differs (field=block_size, theirs=32, ours=16)"
            )
        )
        assert await choose(cluster, 10)
        assert not stranger.got(StartDecode)
        p.say(PairState(stranger.ref, False, reason="the link broke", generation=1))
        assert not await choose(cluster, 10)
        assert len(stranger.got(StartDecode)) == 1
