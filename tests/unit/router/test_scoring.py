"""What each part of a candidate's cost follows."""

from __future__ import annotations

import pytest

from pdserve.block_messages import BlockCounts, BlockEvents
from pdserve.blockhash import hash_blocks
from pdserve.messages import StartDecode, StartPrefill
from pdserve.sampling import FinishReason
from router.attempt_need import Need
from router.member import Member
from router.priors import HANDOVER, TRIP, CostParameters, Priors
from router.scoring import Scoring
from tests.unit.router.conversation import A
from tests.unit.router.scripted import Cluster, config, load, virtual

IDS = tuple(range(64))  # four blocks


def need(cluster: Cluster, **fields: object) -> Need:
    identity = cluster.app.fleet.identity
    assert identity is not None
    return Need(identity=identity, token_ids=IDS, max_total_tokens=100, **fields)  # type: ignore[arg-type]


def member(cluster: Cluster, worker_id: str) -> Member:
    found = cluster.app.fleet.get(worker_id)
    assert found is not None
    return found


def pair_parts(cluster: Cluster, asked: Need | None = None) -> dict[str, float]:
    """Of p0 and d0."""
    scoring = Scoring(asked or need(cluster), Priors(CostParameters()), cluster.clock.now_s())
    p, d = member(cluster, "p0"), member(cluster, "d0")
    return dict(scoring.pair(p, d, p.pairs["d0"]).parts)


@virtual
async def test_a_decode_worker_without_room_costs_and_the_more_the_more_wait_there() -> None:
    async with Cluster() as cluster:
        _, d = await cluster.pair()
        costs = []
        for free, num_waiting in ((1000, 0), (500, 0), (4, 0), (4, 2)):
            d.say(load(blocks=BlockCounts(free, 0, 1000 - free, 0, 0), num_waiting=num_waiting))
            await cluster.settle()
            costs.append(pair_parts(cluster)["decode"])
        roomy, half_used, full, crowded = costs
        assert half_used - roomy == pytest.approx(0.5 * CostParameters().used_pool_s)
        assert full - half_used == pytest.approx(CostParameters().no_room_s, rel=0.02)
        assert crowded - full == pytest.approx(2 * CostParameters().no_room_s, rel=0.02)


@virtual
async def test_a_pair_that_failed_this_request_costs_and_so_does_any_but_the_preferred() -> None:
    async with Cluster() as cluster:
        await cluster.pair()
        avoid_s = CostParameters().avoid_s
        assert pair_parts(cluster)["history"] == 0.0
        assert pair_parts(cluster, need(cluster, avoid={("p0", "d0"): 2}))["history"] == 2 * avoid_s
        assert pair_parts(cluster, need(cluster, prefer=("p0", "d1")))["history"] == avoid_s
        assert pair_parts(cluster, need(cluster, prefer=("p0", "d0")))["history"] == 0.0


@virtual
async def test_moving_kv_to_another_host_costs_more() -> None:
    async with Cluster() as cluster:
        p, d = await cluster.prefill(host_id="a"), await cluster.decode(host_id="b")
        await cluster.link(p, d)
        far_s = HANDOVER.base_s + HANDOVER.slope_s * CostParameters().other_host * len(IDS)
        assert pair_parts(cluster)["transfer"] == pytest.approx(far_s)


@virtual
async def test_of_a_prompt_that_is_cached_whole_the_last_block_is_computed_and_all_for_prompt_logprobs() -> (
    None
):
    async with Cluster() as cluster:
        p, _ = await cluster.pair()
        hashes = tuple(hash_blocks(IDS, 16, seed=b"seed"))
        p.say(BlockEvents(whole=True, stored=hashes, removed=()))
        await cluster.settle()
        assert pair_parts(cluster)["prefill"] == pytest.approx(16 / 1000)
        assert pair_parts(cluster, need(cluster, takes_hits=False))["prefill"] == pytest.approx(64 / 1000)


@virtual
async def test_the_way_to_a_prefill_worker_is_learnt() -> None:
    async with Cluster() as cluster:
        p, d = await cluster.pair()
        assert pair_parts(cluster)["trip"] == TRIP.base_s
        client = cluster.generate("hello", max_tokens=1)
        d.grant(await d.expect(StartDecode))
        start = await p.expect(StartPrefill)
        await cluster.advance(0.03)
        p.first(start, A, FinishReason.LENGTH, prefill_s=0.01)
        await client.end()
        assert 0.01 < pair_parts(cluster)["trip"] < 0.03


@virtual
async def test_a_local_prefill_beside_streams_teaches_what_one_beside_streams_takes() -> None:
    async with Cluster(config({"allow_local_prefill": True})) as cluster:
        d = await cluster.decode()
        fits = member(cluster, "d0").fits
        for num_running, learnt in ((0, fits.prefill), (4, fits.prefill_busy)):
            d.say(load(num_running=num_running))
            await cluster.settle()
            assert not learnt.known(cluster.clock.now_s())
            client = cluster.generate("hello", max_tokens=1)
            start = await d.expect(StartDecode)
            d.grant(start)
            d.started(start, A)
            d.finished(start, 6)
            await client.end()
            assert learnt.known(cluster.clock.now_s())
