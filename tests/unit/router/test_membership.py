"""Rows 11, 12, 15, 20, 21 of failures.md: who is a member of the cluster, and who isn't any more."""

from __future__ import annotations

import pytest

from pdserve.errors import (
    Incompatible,
    NoWorker,
    UnknownModel,
)
from pdserve.messages import (
    Credits,
    Heartbeat,
    PairState,
    Role,
    StartDecode,
    StartPrefill,
    Superseded,
    TokenizerFile,
    Unpair,
    Welcome,
)
from pdserve.sampling import FinishReason
from pdserve.tokenizer import Tokenizer
from pdserve.wire_version import WIRE_VERSION
from tests.unit.router.conversation import A, B, C, serve, until_running
from tests.unit.router.scripted import Cluster, config, hello, load, virtual

# --- rows 11, 12: epochs


@virtual
async def test_a_restarted_worker_replaces_its_earlier_self_and_nothing_old_is_used() -> None:
    async with Cluster() as cluster:
        p, d = await cluster.pair()
        client, start = await until_running(cluster, p, d, max_tokens=3)
        successor = await cluster.join(hello("d0", Role.DECODE, start_ns=2))
        assert await d.expect(Superseded)
        assert any(order.decode_worker == d.ref for order in p.got(Unpair))
        d.tokens(start, 7, C)  # the old one still speaks: unheard
        p.say(PairState(d.ref, True, "stream", generation=2))  # of the old epoch: no pair of ours
        await cluster.settle()
        assert client.ids() == [A, B] and not successor.got(StartDecode)
        await cluster.link(p, successor)
        again = await successor.expect(StartDecode)
        assert again.token_ids == (*b"hello", A, B)
        await serve(p, successor, C, start=again)
        await client.end()
        assert client.ids() == [A, B, C]


@virtual
async def test_an_earlier_epoch_is_told_that_it_is_superseded_and_the_later_stays() -> None:
    async with Cluster() as cluster:
        late = await cluster.join(hello("d0", Role.DECODE, start_ns=2))
        early = cluster.dial(hello("d0", Role.DECODE, start_ns=1))
        await early.expect(Superseded)
        await early.expect_end(2.0)
        assert late.lost is None
        assert [worker.epoch for worker in cluster.app.status().workers] == [str(late.ref.epoch)]


@virtual
async def test_a_second_session_of_one_process_ends_the_first() -> None:
    async with Cluster() as cluster:
        first = await cluster.decode()
        second = cluster.dial(first.hello)
        await second.expect(Welcome)
        await first.expect_end(2.0)
        assert not first.got(Superseded) and second.lost is None


# --- row 15: an engine that hangs


@virtual
async def test_a_step_counter_that_stands_still_with_work_in_hand_is_a_lost_worker() -> None:
    async with Cluster() as cluster:
        p, d = await cluster.pair()
        client, _ = await until_running(cluster, p, d)
        d.silent = True
        hung_s = cluster.clock.now_s()
        while d.lost is None:
            d.say(Heartbeat(100, True))
            await cluster.advance(0.5)
        assert 5.0 <= cluster.clock.now_s() - hung_s <= 6.6
        # It dials again: nothing is placed there until the counter moves.
        again = await cluster.join(d.hello)
        again.silent = True
        again.say(Heartbeat(100, True))
        await cluster.link(p, again)
        assert not again.got(StartDecode) and cluster.app.status().workers[-1].state == "hung"
        again.say(Heartbeat(101, True))
        await again.expect(StartDecode)
        client.generation.close()


@virtual
async def test_a_slow_step_and_the_first_step_are_no_hang() -> None:
    async with Cluster() as cluster:
        _, d = await cluster.pair()
        d.silent = True
        for _ in range(40):
            d.say(Heartbeat(0, True))  # the first step of all
            await cluster.advance(0.5)
        assert d.lost is None
        d.say(load(step_s=0.1, slowest_step_s=1.0))  # a long prompt's chunk among many short steps
        for _ in range(18):
            d.say(Heartbeat(1, True))
            await cluster.advance(0.5)
        assert d.lost is None
        for _ in range(4):
            d.say(Heartbeat(1, True))
            await cluster.advance(0.5)
        assert d.lost is not None


@virtual
async def test_a_worker_that_says_nothing_is_lost_after_the_link_s_time() -> None:
    async with Cluster() as cluster:
        _, d = await cluster.pair()
        d.silent = True
        await cluster.advance(3.9)
        assert d.lost is None
        await cluster.advance(1.0)
        assert d.lost is not None


@virtual
async def test_a_router_that_stood_still_itself_takes_nobody_for_dead() -> None:
    async with Cluster() as cluster:
        p, d = await cluster.pair()
        cluster.clock.advance(10.0)  # what the workers said meanwhile lies unread
        await cluster.advance(2.0)
        assert p.lost is None and d.lost is None


# --- row 20: a role is missing


@virtual
async def test_requests_wait_for_a_missing_role_and_are_told_its_name() -> None:
    async with Cluster() as cluster:
        p = await cluster.prefill()
        client = cluster.generate("hello")
        begun_s = cluster.clock.now_s()
        while not client.done:
            await cluster.advance(1.0)
        assert isinstance(client.error, NoWorker) and client.error.fields["missing"] == "decode"
        assert cluster.clock.now_s() - begun_s == pytest.approx(30, abs=1.1)
        assert cluster.serving == []
        later = cluster.generate("hello", max_tokens=1)
        await cluster.advance(10)
        d = await cluster.decode()
        await cluster.link(p, d)
        assert cluster.serving == [True]
        d.grant(await d.expect(StartDecode))
        p.first(await p.expect(StartPrefill), A, FinishReason.LENGTH)
        await later.end()
        assert later.error is None
        d.die()
        await cluster.settle()
        assert cluster.serving == [True, False]


@virtual
async def test_each_request_waits_its_own_time_for_a_missing_role() -> None:
    async with Cluster() as cluster:
        await cluster.prefill()
        first = cluster.generate("hello")
        await cluster.advance(20)
        second = cluster.generate("hello")
        await cluster.advance(11)
        assert first.done and not second.done
        await cluster.advance(20)
        assert isinstance(second.error, NoWorker) and "prefill" not in str(second.error)


@virtual
async def test_what_fits_only_a_worker_that_has_gone_waits_for_it_and_lets_others_pass() -> None:
    async with Cluster() as cluster:
        p, d = await cluster.pair()
        client, _ = await until_running(cluster, p, d, max_tokens=2000)
        small = await cluster.decode("d1", window_tokens=64)
        await cluster.link(p, small)
        d.say(load(draining=True))
        await cluster.settle()
        other, _ = await until_running(cluster, p, small, max_tokens=20)
        d.die()
        small.die()
        await cluster.settle()
        small = await cluster.decode("d1", window_tokens=64, start_ns=2)
        await cluster.link(p, small)
        assert (
            await small.expect(StartDecode)
        ).key.max_tokens == 20  # a replay, behind the one that can't go
        other.generation.close()
        begun_s = cluster.clock.now_s()
        while not client.done:
            small.say(load())  # as workers do now and then
            await cluster.advance(1.0)
        assert isinstance(client.error, NoWorker) and client.error.fields["limit"] == 64
        assert cluster.clock.now_s() - begun_s == pytest.approx(30, abs=2.1)


@virtual
async def test_a_decode_worker_prefills_alone_where_that_is_allowed() -> None:
    async with Cluster(config({"allow_local_prefill": True})) as cluster:
        d = await cluster.decode()
        client = cluster.generate("hello", max_tokens=1)
        start = await d.expect(StartDecode)
        assert start.source is None
        d.grant(start)
        d.started(start, A)
        d.finished(start, 6)
        await client.end()
        assert client.ids() == [A]


@virtual
async def test_requests_before_the_first_worker_wait_for_it_and_its_tokenizer() -> None:
    async with Cluster(tokenizer=False) as cluster:
        client = cluster.generate("hello", max_tokens=1)
        await cluster.settle(1.0)
        ready_before = cluster.app.ready
        p = cluster.dial(hello("p0", Role.PREFILL))
        assert (await p.expect(Welcome)).wants_tokenizer
        files = Tokenizer.fake().files
        for index, (name, content) in enumerate(files.items()):
            p.say(TokenizerFile(name, content, index == len(files) - 1))
        p.say(load(), Credits(100))
        d = cluster.dial(hello("d0", Role.DECODE))
        await d.expect(Welcome)
        d.say(load())
        await cluster.settle()
        assert cluster.app.ready and not ready_before
        await cluster.link(p, d)
        assert (await d.expect(StartDecode)).token_ids == tuple(b"hello")
        client.generation.close()


# --- row 21: an incompatible worker


@virtual
async def test_an_incompatible_worker_is_refused_by_name_and_never_routed_to() -> None:
    async with Cluster() as cluster:
        await cluster.pair()
        bad = cluster.dial(hello("d9", Role.DECODE, weights_fingerprint="other"))
        lost = await bad.expect_end()
        assert "weights_fingerprint" in str(lost) and "other" in str(lost)
        assert not bad.got(Welcome)
        assert [worker.id for worker in cluster.app.status().workers] == ["p0", "d0"]


@virtual
async def test_a_worker_of_another_major_version_is_refused_and_one_of_another_minor_taken_in() -> None:
    major, minor = WIRE_VERSION
    async with Cluster() as cluster:
        bad = cluster.dial(hello("d8", Role.DECODE, wire=(major + 1, 0)))
        lost = await bad.expect_end()
        assert isinstance(lost, Incompatible) and lost.fields["field"] == "wire"
        for name, wire in (("d0", None), ("d1", (major, minor + 1))):
            taken = cluster.dial(hello(name, Role.DECODE, wire=wire))
            assert (await taken.expect(Welcome)).wire == WIRE_VERSION


@virtual
async def test_a_router_with_a_model_of_its_own_is_ready_alone_and_takes_no_other_tokenizer() -> None:
    async with Cluster() as cluster:
        assert cluster.app.ready
        assert await cluster.app.tokenize("hi") == tuple(b"hi")
        bad = cluster.dial(hello("d9", Role.DECODE, tokenizer_fingerprint="other"))
        lost = await bad.expect_end()
        assert isinstance(lost, Incompatible)
        assert lost.fields["theirs"] == "other" and lost.fields["ours"] == Tokenizer.fake().fingerprint
        good = cluster.dial(hello("d0", Role.DECODE))
        assert not (await good.expect(Welcome)).wants_tokenizer


@virtual
async def test_another_model_s_workers_get_nothing_that_began_on_this_one() -> None:
    async with Cluster() as cluster:
        p, d = await cluster.pair()
        client, _ = await until_running(cluster, p, d)
        p.die()
        d.die()
        await cluster.settle()
        both = cluster.dial(hello("b0", Role.BOTH, weights_fingerprint="newer"))
        await both.expect(Welcome)
        both.say(load())
        await client.end()
        assert isinstance(client.error, UnknownModel) and not both.got(StartDecode)
        assert client.ids() == [A, B]


@virtual
async def test_who_comes_while_the_router_parts_with_all_is_sent_away_too() -> None:
    async with Cluster() as cluster:
        worker = cluster.dial(hello("d0", Role.DECODE))
        cluster.app.close_sessions()
        await worker.expect_end(2.0)
        assert not cluster.app.status().workers
