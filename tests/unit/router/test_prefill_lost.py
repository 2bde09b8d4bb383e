"""Rows 3, 4, 5 of failures.md: the prefill worker is lost before and after the hand-off."""

from __future__ import annotations

from pdserve.errors import (
    LinkLost,
    Overloaded,
    RowFailed,
    WorkerLost,
)
from pdserve.messages import (
    Abort,
    PairState,
    Phase,
    StartDecode,
    StartPrefill,
    Waiting,
)
from pdserve.sampling import FinishReason
from tests.unit.router.conversation import A, B, C, serve, until_prefill
from tests.unit.router.scripted import Cluster, load, virtual

# --- rows 3, 4: the prefill worker is lost before CONFIRM


@virtual
async def test_prefill_refuses_the_decode_worker_is_aborted_and_the_attempt_is_not_counted() -> None:
    async with Cluster() as cluster:
        p, d = await cluster.pair()
        client, start, prefill = await until_prefill(cluster, p, d, max_tokens=1)
        for refusal in (Overloaded("queue full"), WorkerLost("no link"), WorkerLost("no"), WorkerLost("no")):
            p.refuse(prefill, refusal)
            assert (await d.expect(Abort)).handle == start.handle
            await cluster.settle()
            assert d.got(StartDecode)[-1].handle == start.handle  # nothing before P's next load report
            p.say(load())
            before, start = start, await d.expect(StartDecode)
            assert start.handle != before.handle
            d.grant(start)
            prefill = await p.expect(StartPrefill)
        p.first(prefill, A, FinishReason.LENGTH)
        await client.end()
        assert client.ids() == [A] and client.finished().num_attempts == 1


@virtual
async def test_prefill_dies_the_router_waits_for_the_verdict_and_tries_another_pair() -> None:
    async with Cluster() as cluster:
        p, d = await cluster.pair()
        other = await cluster.prefill("p1")
        await cluster.link(other, d)
        client = cluster.generate("hello", max_tokens=2)
        start = await d.expect(StartDecode)
        first, second = (p, other) if start.source == p.ref else (other, p)
        d.grant(start)
        await first.expect(StartPrefill)
        first.die()
        await cluster.settle(1.0)
        assert len(d.got(StartDecode)) == 1  # no new attempt before D's verdict
        d.fail(start, WorkerLost("the link to P ended"))
        again = await serve(second, d, A, B)
        assert again.source == second.ref and again.token_ids == start.token_ids
        await client.end()
        assert client.ids() == [A, B] and client.finished().num_attempts == 2


@virtual
async def test_prefill_dies_after_its_first_token_which_is_replayed_and_never_sent_twice() -> None:
    async with Cluster() as cluster:
        p, d = await cluster.pair()
        other = await cluster.prefill("p1")
        await cluster.link(other, d)
        client = cluster.generate("hello", max_tokens=3)
        start = await d.expect(StartDecode)
        first, second = (p, other) if start.source == p.ref else (other, p)
        d.grant(start)
        first.first(await first.expect(StartPrefill), A)
        await cluster.settle()
        assert client.ids() == [A]
        first.die()
        d.fail(start, WorkerLost("the link to P ended"))
        again = await d.expect(StartDecode)
        assert again.token_ids == (*b"hello", A) and again.num_prompt_tokens == 5
        assert again.key == start.key and again.handle != start.handle
        await serve(second, d, B, C, start=again)
        await client.end()
        assert client.ids() == [A, B, C] and client.text() == "abc"


@virtual
async def test_no_verdict_in_time_ends_the_attempt() -> None:
    async with Cluster() as cluster:
        p, d = await cluster.pair()
        client, start, _ = await until_prefill(cluster, p, d, max_tokens=1)
        p.die()
        died_s = cluster.clock.now_s()
        while not d.got(Abort):
            await cluster.advance(0.5)
        assert 6.0 <= cluster.clock.now_s() - died_s <= 6.6
        assert d.got(Abort)[0].handle == start.handle
        client.generation.close()


@virtual
async def test_the_time_for_the_verdict_begins_anew_while_blocks_arrive() -> None:
    async with Cluster() as cluster:
        p, d = await cluster.pair()
        client, start, prefill = await until_prefill(cluster, p, d)
        p.first(prefill, A)
        for amount in (1, 2, 3):
            await cluster.advance(5.0)
            d.progress(start, Phase.PULLING, amount)
        await cluster.advance(5.0)
        assert not d.got(Abort)
        d.progress(start, Phase.PULLING, 3)  # no growth
        await cluster.advance(1.5)
        assert d.got(Abort)
        client.generation.close()


@virtual
async def test_prefill_failed_is_followed_by_the_verdict_and_its_own_error_counts() -> None:
    async with Cluster() as cluster:
        p, d = await cluster.pair()
        client, start, prefill = await until_prefill(cluster, p, d)
        p.fail(prefill, RowFailed("NaN logits"))
        await cluster.settle()
        assert not client.done
        d.fail(start, WorkerLost("withdrawn"))
        await client.end()
        assert isinstance(client.error, RowFailed)
        assert len(d.got(StartDecode)) == 1


@virtual
async def test_prefill_lost_before_its_command_was_written_is_a_plain_new_attempt() -> None:
    async with Cluster() as cluster:
        p, d = await cluster.pair()
        other = await cluster.prefill("p1")
        await cluster.link(other, d)
        client = cluster.generate("hello", max_tokens=1)
        start = await d.expect(StartDecode)
        d.say(Waiting(start.handle, 0))
        first, second = (p, other) if start.source == p.ref else (other, p)
        await cluster.settle()
        first.die()
        again = await d.expect(StartDecode)
        assert again.source == second.ref and d.got(Abort)[0].handle == start.handle
        client.generation.close()


@virtual
async def test_a_decode_worker_knows_first_that_a_prefill_worker_is_dead_and_one_attempt_is_lost() -> None:
    """Both its pairs look up; nothing more is placed on it until it gives a sign of life."""
    async with Cluster() as cluster:
        p, d0 = await cluster.pair()
        d1 = await cluster.decode("d1")
        await cluster.link(p, d1)
        client = cluster.generate("hello", max_tokens=1)
        await cluster.settle()
        d, other = (d0, d1) if d0.got(StartDecode) else (d1, d0)
        start = await d.expect(StartDecode)
        d.grant(start)
        await p.expect(StartPrefill)
        d.fail(start, LinkLost("the link ended", generation=1))
        await cluster.settle(0.1)
        assert len(d.got(StartDecode)) == 1 and not other.got(StartDecode)
        p.say(load())  # it lives: over its other link it may serve
        again = await other.expect(StartDecode)
        assert len(d.got(StartDecode)) == 1
        other.grant(again)
        p.first(await p.expect(StartPrefill), A, FinishReason.LENGTH)
        await client.end()
        assert client.ids() == [A] and client.finished().num_attempts == 2


@virtual
async def test_what_a_decode_worker_says_of_an_earlier_link_is_no_news() -> None:
    async with Cluster() as cluster:
        p, d = await cluster.pair()
        client, start, _ = await until_prefill(cluster, p, d, max_tokens=1)
        p.say(PairState(d.ref, False, "", "it broke", generation=1))
        p.say(PairState(d.ref, True, "stream", generation=2))
        p.say(load())
        await cluster.settle()
        d.fail(start, LinkLost("the link ended", generation=1))
        await cluster.settle()
        p.say(load())
        again = await d.expect(StartDecode)
        assert again.handle != start.handle
        client.generation.close()


# --- row 5: lost after the hand-off


@virtual
async def test_prefill_lost_after_the_hand_off_token_0_comes_from_started() -> None:
    async with Cluster() as cluster:
        p, d = await cluster.pair()
        client, start, _ = await until_prefill(cluster, p, d, max_tokens=2)
        p.die()
        await cluster.settle()
        d.started(start, A)
        d.tokens(start, 6, B)
        d.finished(start, 7)
        await client.end()
        assert client.ids() == [A, B] and client.finished().num_attempts == 1
        assert len(d.got(StartDecode)) == 1
