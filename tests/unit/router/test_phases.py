"""Each phase of an attempt has its own time-out, or none; and what workers must never say."""

from __future__ import annotations

from structlog.testing import capture_logs

from pdserve.errors import DeadlineExceeded, Overloaded, WorkerLost
from pdserve.messages import (
    Abort,
    Credits,
    Phase,
    StartDecode,
    StartPrefill,
    Waiting,
)
from pdserve.sampling import FinishReason
from router.candidates import MOST_ASKING
from tests.unit.router.conversation import A, B, C, D, until_prefill, until_running
from tests.unit.router.scripted import Cluster, load, virtual

# --- time-outs of the phases


@virtual
async def test_a_decode_worker_that_lives_may_take_its_time_to_answer_and_no_attempt_is_spent() -> None:
    async with Cluster() as cluster:
        p, d = await cluster.pair()
        client = cluster.generate("hello", max_tokens=1)
        start = await d.expect(StartDecode)
        await cluster.advance(100)  # it beats, and says nothing about this one
        assert not d.got(Abort)
        d.grant(start)
        p.first(await p.expect(StartPrefill), A, FinishReason.LENGTH)
        await client.end()
        assert client.finished().num_attempts == 1


@virtual
async def test_who_waits_for_an_answer_waits_no_longer_than_the_worker_lives() -> None:
    async with Cluster() as cluster:
        p, d = await cluster.pair()
        d1 = await cluster.decode("d1")
        await cluster.link(p, d1)
        client = cluster.generate("hello", max_tokens=1)
        await cluster.settle()
        first, second = (d, d1) if d.got(StartDecode) else (d1, d)
        first.silent = True
        await cluster.advance(5)  # link_s = 4
        await second.expect(StartDecode)
        client.generation.close()


@virtual
async def test_who_waits_for_an_answer_waits_no_longer_than_its_client() -> None:
    async with Cluster() as cluster:
        _, d = await cluster.pair()
        client = cluster.generate("hello", deadline_left_s=7.0)
        start = await d.expect(StartDecode)
        await cluster.advance(8)
        assert isinstance(client.error, DeadlineExceeded)
        assert d.got(Abort)[0].handle == start.handle


@virtual
async def test_a_decode_worker_is_asked_for_so_many_grants_at_a_time_and_the_others_wait_in_the_queue() -> (
    None
):
    async with Cluster() as cluster:
        _, d = await cluster.pair()
        clients = [cluster.generate("hello") for _ in range(MOST_ASKING + 3)]
        await cluster.settle()
        starts = d.got(StartDecode)
        assert len(starts) == MOST_ASKING
        assert cluster.app.admission.num_waiting == 3
        d.say(load())  # of itself no reason to send more
        await cluster.settle()
        assert len(d.got(StartDecode)) == MOST_ASKING
        d.grant(starts[0])
        d.refuse(starts[1], Overloaded("no room"))
        await cluster.settle()
        d.say(load())
        await cluster.settle()
        assert len(d.got(StartDecode)) == MOST_ASKING + 2
        for client in clients:
            client.generation.close()


@virtual
async def test_a_worker_that_says_nothing_at_all_is_judged_as_a_worker_not_by_one_request() -> None:
    async with Cluster() as cluster:
        p, d = await cluster.pair()
        await cluster.advance(0.5)
        d.silent = True  # it gets no CPU
        clients = [cluster.generate("hello", max_tokens=1) for _ in range(3)]
        starts = [await d.expect(StartDecode) for _ in range(3)]
        await cluster.advance(2.5)
        assert not d.got(Abort)
        for start in starts:  # and now it got some
            d.grant(start)
            p.first(await p.expect(StartPrefill), A, FinishReason.LENGTH)
        for client in clients:
            await client.end()
            assert client.finished().num_attempts == 1


@virtual
async def test_waiting_and_queued_have_no_time_out_of_their_own() -> None:
    async with Cluster() as cluster:
        p, d = await cluster.pair()
        client = cluster.generate("hello", max_tokens=1)
        start = await d.expect(StartDecode)
        d.say(Waiting(start.handle, 3))
        await cluster.advance(100)
        d.grant(start)
        prefill = await p.expect(StartPrefill)
        p.progress(prefill, Phase.QUEUED)
        await cluster.advance(100)
        p.first(prefill, A, FinishReason.LENGTH)
        await client.end()
        assert client.error is None


@virtual
async def test_who_is_in_one_state_for_long_is_logged_once_with_state_peer_and_age() -> None:
    with capture_logs() as logs:
        async with Cluster() as cluster:
            p, d = await cluster.pair()
            p.say(Credits(0))
            await cluster.settle()
            client = cluster.generate("hello", max_tokens=1)
            await cluster.advance(8)
            p.say(Credits(100))
            start = await d.expect(StartDecode)
            d.say(Waiting(start.handle, 0))
            await cluster.advance(8)
            d.grant(start)
            p.progress(await p.expect(StartPrefill), Phase.QUEUED)
            await cluster.advance(8)
            client.generation.close()
    told = [entry for entry in logs if entry["event"] == "request.stuck"]
    assert [(entry["state"], entry["prefill"], entry["decode"]) for entry in told] == [
        ("in the queue", "", ""),
        ("waiting", "p0", "d0"),
        ("queued", "p0", "d0"),
    ]
    assert told[0]["why"] == "p0>d0 no credit of p0"
    assert all(5.0 < entry["age_s"] < 6.0 for entry in told)


@virtual
async def test_prefill_progress_starts_its_time_anew_and_standing_still_is_a_fault() -> None:
    async with Cluster() as cluster:
        p, d = await cluster.pair()
        client, start, prefill = await until_prefill(cluster, p, d)
        for amount in (1, 2, 3):
            p.progress(prefill, Phase.PREFILLING, amount)
            await cluster.advance(9)
        assert not d.got(Abort)
        p.progress(prefill, Phase.PREFILLING, 3)  # a heartbeat repeats it
        await cluster.advance(2)
        assert d.got(Abort)[0].handle == start.handle and p.got(Abort)[0].handle == start.handle
        client.generation.close()


@virtual
async def test_a_chunk_may_take_as_long_as_it_takes_and_what_is_lost_in_it_is_told_with_the_settings() -> (
    None
):
    with capture_logs() as logs:
        async with Cluster() as cluster:
            p, d = await cluster.pair()
            client, _, prefill = await until_prefill(cluster, p, d)
            p.progress(prefill, Phase.PREFILLING, 0)
            p.in_step_s = 0.5
            await cluster.advance(60)  # prefill_progress_s = 10
            assert not d.got(Abort)
            p.progress(prefill, Phase.PREFILLING, 3)
            p.in_step_s = 0.0
            await cluster.advance(9)
            assert not d.got(Abort)
            await cluster.advance(2)
            assert d.got(Abort)
            client.generation.close()
    told = [entry["reason"] for entry in logs if entry["event"] == "attempt.failed"]
    assert len(told) == 1
    assert "settings=timeouts.prefill_progress_s, engine.max_step_tokens" in told[0]


@virtual
async def test_a_verdict_and_a_token_may_wait_for_long_steps_and_their_time_follows_the_slowest() -> None:
    async with Cluster() as cluster:
        p, d = await cluster.pair()
        d.say(load(slowest_step_s=3.0))
        await cluster.settle()
        client, start, prefill = await until_prefill(cluster, p, d)
        p.first(prefill, A)
        await cluster.advance(20)  # handoff_s = 6
        d.started(start, A)
        await cluster.advance(29)  # token_gap_s = 10
        d.tokens(start, 6, B)
        d.say(load(slowest_step_s=0.02))
        await cluster.settle()
        assert client.ids() == [A, B]
        d.tokens(start, 7, C)
        d.in_step_s = 0.5
        await cluster.advance(60)
        assert not d.got(Abort)
        d.in_step_s = 0.0
        await cluster.advance(11)
        assert d.got(Abort)
        client.generation.close()


@virtual
async def test_a_gap_between_tokens_is_a_fault() -> None:
    async with Cluster() as cluster:
        p, d = await cluster.pair()
        client, start = await until_running(cluster, p, d)
        await cluster.advance(9)
        d.tokens(start, 7, C)
        await cluster.advance(9)
        assert not d.got(Abort)
        await cluster.advance(2)
        assert d.got(Abort)[0].handle == start.handle
        again = await d.expect(StartDecode)
        assert again.token_ids == (*b"hello", A, B, C)
        client.generation.close()


# --- what workers must never say


@virtual
async def test_messages_under_a_closed_handle_are_dropped_and_counted() -> None:
    async with Cluster() as cluster:
        p, d = await cluster.pair()
        client, start = await until_running(cluster, p, d)
        d.fail(start, WorkerLost("gone"))
        again = await d.expect(StartDecode)
        d.tokens(start, 7, C)
        d.finished(start, 8)
        await cluster.settle()
        assert client.ids() == [A, B] and again.token_ids == (*b"hello", A, B)
        count = cluster.app.metrics.registry.get_sample_value(
            "pdserve_session_dropped_total", {"message": "StepTokens"}
        )
        assert count == 1
        client.generation.close()


@virtual
async def test_a_gap_in_the_tokens_is_our_bug_and_never_shown() -> None:
    async with Cluster() as cluster:
        p, d = await cluster.pair()
        client, start = await until_running(cluster, p, d)
        d.tokens(start, 8, D)
        await client.end()
        assert client.error is not None and client.error.code.value == "INTERNAL"
        assert client.ids() == [A, B]
