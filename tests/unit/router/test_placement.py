"""Which pair an attempt gets, and why the others don't."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from structlog.testing import capture_logs

from pdserve.block_messages import BlockCounts, BlockEvents
from pdserve.blockhash import hash_blocks
from pdserve.errors import Overloaded
from pdserve.ids import AttemptName, WorkerRef
from pdserve.messages import (
    Credits,
    Demand,
    Pair,
    PairState,
    Phase,
    Role,
    StartDecode,
    StartPrefill,
    Unpair,
)
from pdserve.sampling import FinishReason
from pdserve.service.config import Config, LogConfig
from pdserve.service.router_config import RouterConfig
from pdserve.status import CLUSTER_STATUS
from router.explain import NUM_KEPT
from router.pairs import rank_decodes
from tests.unit.router.scripted import Cluster, config, hello, load, virtual


@virtual
async def test_only_pairs_that_are_up_are_used() -> None:
    async with Cluster() as cluster:
        p, d0, d1 = await cluster.prefill(), await cluster.decode("d0"), await cluster.decode("d1")
        p.say(PairState(d0.ref, False, reason="layout: block_size 16, here 32"))
        await cluster.link(p, d1)
        clients = [cluster.generate("hello") for _ in range(4)]
        await cluster.settle()
        assert len(d1.got(StartDecode)) == 4 and not d0.got(StartDecode)
        states = {pair.decode_worker: (pair.up, pair.reason) for pair in cluster.app.status().pairs}
        assert states == {"d0": (False, "layout: block_size 16, here 32"), "d1": (True, "")}
        for client in clients:
            client.generation.close()


@virtual
async def test_requests_spread_evenly_before_any_report_and_one_at_a_time() -> None:
    async with Cluster() as cluster:
        p = await cluster.prefill()
        decodes = [await cluster.decode(f"d{n}") for n in range(4)]
        await cluster.link(p, *decodes)
        clients = [cluster.generate("hello") for _ in range(40)]
        await cluster.settle()
        assert [len(d.got(StartDecode)) for d in decodes] == [10, 10, 10, 10]
        for client in clients:
            client.generation.close()
        await cluster.advance(1.0)
        for _ in range(200):
            client = cluster.generate("hello")
            await cluster.settle(0.004)
            client.generation.close()
            await cluster.advance(0.05)
        counts = [len(d.got(StartDecode)) - 10 for d in decodes]
        assert sum(counts) == 200 and max(counts) <= 1.2 * min(counts)


@virtual
async def test_among_equals_a_draw_decides_so_that_routers_do_not_all_begin_at_the_same_worker() -> None:
    firsts: set[str] = set()
    for seed in range(12):
        async with Cluster(seed=seed) as cluster:
            p = await cluster.prefill()
            decodes = [await cluster.decode(f"d{n}") for n in range(3)]
            await cluster.link(p, *decodes)
            client = cluster.generate("hello")
            await cluster.settle()
            firsts.update(d.hello.worker.id for d in decodes if d.got(StartDecode))
            client.generation.close()
    assert firsts == {"d0", "d1", "d2"}


@virtual
async def test_the_less_loaded_is_taken_by_report() -> None:
    async with Cluster() as cluster:
        p, d0 = await cluster.pair()
        d1 = await cluster.decode("d1")
        await cluster.link(p, d1)
        d0.say(load(num_running=20))
        await cluster.settle()
        client = cluster.generate("hello")
        await d1.expect(StartDecode)
        d1.say(load(blocks=BlockCounts(0, 0, 1000, 0, 0)))
        await cluster.settle()
        full = cluster.generate("hello")
        await d0.expect(StartDecode)
        client.generation.close()
        full.generation.close()


@virtual
async def test_a_prefix_that_a_prefill_worker_holds_draws_the_request_there() -> None:
    async with Cluster() as cluster:
        p0, d = await cluster.pair()
        p1 = await cluster.prefill("p1")
        await cluster.link(p1, d)
        prompt = "x" * 400
        hashes = tuple(hash_blocks(tuple(prompt.encode()), 16, seed=b"seed"))
        p1.say(BlockEvents(whole=True, stored=hashes, removed=()))
        await cluster.settle()
        clients = []
        for _ in range(3):
            clients.append(cluster.generate(prompt))
            assert (await d.expect(StartDecode)).source == p1.ref
        other = cluster.generate("y" * 400)
        assert (await d.expect(StartDecode)).source == p0.ref
        salted = cluster.generate(prompt, cache_salt="mine")
        await d.expect(StartDecode)
        for client in (*clients, other, salted):
            client.generation.close()


@virtual
async def test_without_credit_nothing_is_sent_and_demand_is_told() -> None:
    async with Cluster() as cluster:
        p, d = await cluster.pair()
        p.say(Credits(1))
        await cluster.settle()
        clients = [cluster.generate("x" * 30) for _ in range(3)]
        start = await d.expect(StartDecode)  # one prompt may take the balance below zero
        await cluster.settle()
        assert len(d.got(StartDecode)) == 1
        await cluster.advance(0.6)
        assert p.got(Demand)[-1].num_queued_tokens == 60
        p.say(Credits(31))
        await cluster.settle()
        assert (
            len(d.got(StartDecode)) == 2
        )  # 31 − 30 of the first one is above zero, − 30 of the second isn't
        for client in clients:
            client.generation.close()
        assert start.source == p.ref


@virtual
async def test_demand_is_told_to_prefill_workers_in_equal_parts() -> None:
    async with Cluster() as cluster:
        p0, d = await cluster.pair()
        p1 = await cluster.prefill("p1")
        await cluster.link(p1, d)
        for each in (p0, p1):
            each.say(Credits(0))
        await cluster.settle()
        client = cluster.generate("x" * 41)
        await cluster.advance(0.6)
        assert [each.got(Demand)[-1].num_queued_tokens for each in (p0, p1)] == [21, 21]
        client.generation.close()
        await cluster.advance(0.6)
        assert [each.got(Demand)[-1].num_queued_tokens for each in (p0, p1)] == [0, 0]


@virtual
async def test_credit_is_counted_by_the_router_until_the_worker_counts_it_and_then_spent_again() -> None:
    async with Cluster() as cluster:
        p, d = await cluster.pair()
        p.say(Credits(30))
        await cluster.settle()
        first, second = cluster.generate("x" * 30), cluster.generate("y" * 30)
        d.grant(await d.expect(StartDecode))
        start = await p.expect(StartPrefill)
        await cluster.settle()
        assert len(d.got(StartDecode)) == 1
        p.say(Credits(30))  # it has accepted the first one, and its share has grown by as much
        p.progress(start, Phase.QUEUED)
        await d.expect(StartDecode)
        first.generation.close()
        second.generation.close()


@virtual
async def test_credit_that_an_ended_attempt_held_goes_to_the_next() -> None:
    async with Cluster() as cluster:
        p, d = await cluster.pair()
        p.say(Credits(1))
        await cluster.settle()
        first, second = cluster.generate("x" * 30), cluster.generate("y" * 30)
        await d.expect(StartDecode)
        first.generation.close()
        await d.expect(StartDecode)
        second.generation.close()


@virtual
async def test_each_prefill_worker_is_paired_with_so_many_decode_workers_by_rendezvous() -> None:
    async with Cluster(config({"pairs_per_prefill": 2})) as cluster:
        p = await cluster.prefill()
        names = [f"d{n}" for n in range(5)]
        for name in names:
            await cluster.decode(name)
        wanted = {pair.decode_worker for pair in cluster.app.status().pairs}
        assert wanted == set(rank_decodes("p0", names)[:2])
        ordered = {message.decode_worker.id for message in p.got(Pair)}
        taken_back = {message.decode_worker.id for message in p.got(Unpair)}
        assert ordered - taken_back == wanted


@virtual
async def test_another_link_is_ordered_where_all_linked_decode_workers_refuse() -> None:
    from pdserve.errors import Overloaded

    async with Cluster(config({"pairs_per_prefill": 1})) as cluster:
        p, d0, d1 = await cluster.prefill(), await cluster.decode("d0"), await cluster.decode("d1")
        (order,) = cluster.app.status().pairs
        linked = d0 if order.decode_worker == "d0" else d1
        await cluster.link(p, linked)
        client = cluster.generate("hello")
        linked.refuse(await linked.expect(StartDecode), Overloaded("full"))
        await cluster.settle()
        assert len(cluster.app.status().pairs) == 2
        client.generation.close()


@virtual
async def test_an_extra_link_is_given_up_when_the_regular_one_has_had_room_for_a_minute() -> None:
    async with Cluster(config({"pairs_per_prefill": 1})) as cluster:
        p, d0, d1 = await cluster.prefill(), await cluster.decode("d0"), await cluster.decode("d1")
        (order,) = cluster.app.status().pairs
        regular, extra = (d0, d1) if order.decode_worker == "d0" else (d1, d0)
        await cluster.link(p, regular)
        num_before = len(p.got(Unpair))
        for _ in range(3):  # needed again each time, the last time after 50 s
            client = cluster.generate("hello")
            regular.refuse(await regular.expect(StartDecode), Overloaded("full"))
            await cluster.settle()
            client.generation.close()
            assert len(cluster.app.status().pairs) == 2
            await cluster.advance(25.0)
            regular.say(load())
        await cluster.advance(34.0)
        assert len(p.got(Unpair)) == num_before
        await cluster.advance(2.0)
        assert [message.decode_worker for message in p.got(Unpair)[num_before:]] == [extra.ref]
        assert [pair.decode_worker for pair in cluster.app.status().pairs] == [regular.ref.id]


@virtual
async def test_a_pair_that_a_worker_had_no_room_for_is_asked_for_again() -> None:
    async with Cluster() as cluster:
        p, d = await cluster.prefill(), await cluster.decode()
        p.say(PairState(d.ref, False, reason="full"))
        await cluster.advance(4.0)
        assert len(p.got(Pair)) == 1
        await cluster.advance(2.0)
        assert len(p.got(Pair)) == 2
        await cluster.link(p, d)
        await cluster.advance(11.0)
        assert len(p.got(Pair)) == 2


@virtual
async def test_what_is_told_of_an_earlier_link_is_no_news() -> None:
    async with Cluster() as cluster:
        p, d = await cluster.pair()
        p.say(PairState(d.ref, True, "stream", generation=3))
        p.say(PairState(d.ref, False, reason="it broke", generation=2))
        await cluster.settle()
        assert [pair.up for pair in cluster.app.status().pairs] == [True]


def test_rendezvous_changes_only_what_it_must() -> None:
    names = [f"d{n}" for n in range(20)]
    before = {p: rank_decodes(p, names)[:4] for p in ("p0", "p1", "p2")}
    after = {p: rank_decodes(p, [name for name in names if name != "d7"])[:4] for p in before}
    for p, chosen in before.items():
        assert [name for name in chosen if name != "d7"] == after[p][: len([n for n in chosen if n != "d7"])]
    spread = Counter(name for p in range(200) for name in rank_decodes(f"p{p}", names)[:4])
    assert max(spread.values()) < 2 * min(spread.values())


@virtual
async def test_why_each_candidate_fell_or_won_is_kept() -> None:
    async with Cluster() as cluster:
        p, d0 = await cluster.pair()
        d1 = await cluster.decode("d1", window_tokens=8192)
        await cluster.link(p, d1)
        both = await cluster.join(hello("b0", Role.BOTH))
        await cluster.link(p, both)
        client = cluster.generate("hello", request_id="why")
        await cluster.settle()
        (explained,) = cluster.app.explanations
        assert explained.name == AttemptName("why", 0, 1)
        assert {(verdict.prefill, verdict.decode) for verdict in explained.verdicts} == {
            ("p0", "d0"),
            ("p0", "d1"),
            ("p0", "b0"),
            ("", "b0"),
        }
        (chosen,) = [verdict for verdict in explained.verdicts if verdict.chosen]
        assert all(verdict.cost is not None and verdict.reason for verdict in explained.verdicts)
        assert "ms = " in str(chosen) and str(chosen).endswith(": chosen")
        client.generation.close()
        assert len(d0.got(StartDecode)) + len(d1.got(StartDecode)) + len(both.got(StartDecode)) == 1


@virtual
async def test_equal_workers_get_equally_much_though_what_is_measured_of_them_varies() -> None:
    async with Cluster() as cluster:
        prefills = [await cluster.prefill(f"p{n}") for n in range(3)]
        decodes = [await cluster.decode(f"d{n}") for n in range(4)]
        for p in prefills:
            await cluster.link(p, *decodes)
        workers = {worker.ref: worker for worker in (*prefills, *decodes)}
        draws = random.Random(4)
        counts: Counter[WorkerRef] = Counter()
        for n in range(300):
            client = cluster.generate("x" * 100, cache_salt=str(n), max_tokens=2)
            await cluster.settle(0.003)
            ((d, start),) = [
                (d, d.got(StartDecode)[-1]) for d in decodes if len(d.got(StartDecode)) > counts[d.ref]
            ]
            assert start.source is not None
            counts[d.ref] += 1
            counts[start.source] += 1
            d.grant(start)
            p = workers[start.source]
            prefill = await p.expect(StartPrefill)
            p.first(prefill, 65, queue_s=0.004 * draws.random(), prefill_s=0.1 * draws.uniform(0.8, 1.2))
            d.started(start, 65, transfer_exposed_s=0.01 * draws.random(), commit_s=0.002 * draws.random())
            d.tokens(start, 101, 66)
            d.finished(start, 102)
            await client.end()
            await cluster.advance(draws.choice([0.0, 0.2, 1.0]))
        for group in (prefills, decodes):
            per_worker = [counts[worker.ref] for worker in group]
            assert max(per_worker) <= 1.2 * min(per_worker), counts


@virtual
async def test_one_host_is_preferred_where_the_rest_is_about_equal() -> None:
    async with Cluster() as cluster:
        p = await cluster.prefill(host_id="a")
        near, far = await cluster.decode("d0", host_id="a"), await cluster.decode("d1", host_id="b")
        await cluster.link(p, near, far)
        clients = [cluster.generate("x" * 2000, cache_salt=str(n)) for n in range(3)]
        await cluster.settle()
        assert len(near.got(StartDecode)) == 3
        near.say(load(num_running=200, step_s=0.05))
        await cluster.settle()
        clients.append(cluster.generate("x" * 2000, cache_salt="far"))
        await far.expect(StartDecode)
        assert {verdict.reason for each in cluster.app.explanations for verdict in each.verdicts} == {
            "chosen",
            "about the same, on two hosts",
            "costs more",
        }
        for client in clients:
            client.generation.close()


@virtual
async def test_placements_are_told_with_the_status_if_asked_for_and_so_is_why_one_waits() -> None:
    async with Cluster() as cluster:
        p, _ = await cluster.pair()
        placed = cluster.generate("hello", request_id="placed")
        await cluster.settle()
        p.say(Credits(0))
        await cluster.settle()
        waits = cluster.generate("hello", request_id="waits")
        await cluster.settle(0.25)
        assert not cluster.app.status().placements
        told = CLUSTER_STATUS.read(CLUSTER_STATUS.write(cluster.app.status(explain=True))).placements
        assert [(each.request_id, each.attempt) for each in told] == [("placed", 1), ("waits", 0)]
        (won,), (fell,) = told[0].candidates, told[1].candidates
        assert won.chosen and (won.prefill_worker, won.decode_worker) == ("p0", "d0")
        assert [name for name, _ in won.cost] == [
            "queue",
            "prefill",
            "trip",
            "transfer",
            "decode",
            "history",
        ]
        assert not fell.chosen and fell.reason == "no credit of p0" and not fell.cost
        assert 0.2 < told[1].age_s < 0.3
        placed.generation.close()
        waits.generation.close()


@virtual
async def test_only_the_last_placements_are_kept() -> None:
    async with Cluster() as cluster:
        await cluster.pair()
        for n in range(NUM_KEPT + 5):
            cluster.generate("hello", request_id=f"r{n}").generation.close()
            client = cluster.generate("hello", request_id=f"s{n}")
            await cluster.settle(0.001)
            client.generation.close()
        kept = [each.name.request_id for each in cluster.app.explanations]
        assert kept == [f"s{n}" for n in range(5, NUM_KEPT + 5)]


@pytest.mark.parametrize("level", ["debug", "info"])
def test_the_canonical_line_explains_at_debug_level(level: str) -> None:
    @virtual
    async def scenario() -> None:
        async with Cluster(Config(router=RouterConfig(id="r0"), log=LogConfig(level=level))) as cluster:
            p, d = await cluster.pair()
            client = cluster.generate("hello", max_tokens=1)
            start = await d.expect(StartDecode)
            d.grant(start)
            p.first(await p.expect(StartPrefill), 65, FinishReason.LENGTH)
            await client.end()
            p.say(Credits(0))
            await cluster.settle()
            await cluster.generate("hello", deadline_left_s=1.0).end()

    with capture_logs() as logs:
        scenario()
    lines = [entry for entry in logs if entry["event"] == "request.finished"]
    if level == "debug":
        assert lines[0]["explain"][0][0].startswith("p0>d0 ") and lines[0]["explain"][0][0].endswith(
            ": chosen"
        )
        assert lines[1]["explain"] == [["p0>d0 no credit of p0"]]
    else:
        assert not any("explain" in line for line in lines)
