"""Rows 13, 14, 16, 17, 18 of failures.md: what is run again, how often, and in what order."""

from __future__ import annotations

import pytest

from pdserve.errors import (
    HandedBack,
    Revoked,
    RowFailed,
    StepFailed,
    WorkerLost,
)
from pdserve.messages import (
    Abort,
    Phase,
    Role,
    StartDecode,
    StartPrefill,
    Unsound,
    Waiting,
)
from pdserve.request import Resume, ResumeChoice
from pdserve.sampling import FinishReason
from tests.unit.router.conversation import A, B, C, D, serve, until_prefill, until_running
from tests.unit.router.scripted import Cluster, failure, hello, virtual

# --- row 13: resume at another router


@virtual
async def test_resume_goes_on_behind_the_tokens_that_the_client_holds() -> None:
    async with Cluster() as cluster:
        p, d = await cluster.pair()
        client = cluster.generate(
            "hello", max_tokens=4, seed=5, resume=Resume(5, (ResumeChoice((A, B)),)), stop=("xc",)
        )
        start = await d.expect(StartDecode)
        assert start.token_ids == (*b"hello", A, B) and start.num_prompt_tokens == 5
        assert start.key.seed == 5
        d.grant(start)
        p.first(await p.expect(StartPrefill), C)
        d.started(start, C)
        d.tokens(start, 8, D)
        d.finished(start, 9)
        await client.end()
        assert client.ids() == [C, D] and client.tokens()[0].first_index == 2 and client.text() == "cd"
        assert client.finished().usage.num_completion_tokens == 4


@virtual
async def test_a_stop_string_may_begin_in_what_the_client_holds() -> None:
    async with Cluster() as cluster:
        p, d = await cluster.pair()
        resume = Resume(5, (ResumeChoice((A, B)),))
        client = cluster.generate("hello", max_tokens=4, seed=5, resume=resume, stop=("bc",))
        start = await d.expect(StartDecode)
        d.grant(start)
        p.first(await p.expect(StartPrefill), C)
        d.started(start, C)
        await client.end()
        assert client.finished().reason is FinishReason.STOP_TEXT
        assert (client.ids(), client.text()) == ([C], "")


@virtual
async def test_resume_of_a_finished_choice_ends_at_once() -> None:
    async with Cluster() as cluster:
        await cluster.pair()
        held = ResumeChoice((A,), FinishReason.EOS)
        client = cluster.generate("hello", seed=5, resume=Resume(5, (held,)))
        await client.end()
        assert client.error is None and client.finished().reason is FinishReason.EOS and not client.tokens()


# --- row 14: a session reset with many streams on it


@virtual
async def test_replays_go_ahead_of_new_requests_and_only_so_many_at_a_time() -> None:
    async with Cluster() as cluster:
        p, d = await cluster.pair()
        running = []
        for _ in range(8):
            client, start = await until_running(cluster, p, d, max_tokens=50)
            running.append((client, start))
        d.die()
        d1 = await cluster.join(hello("d1", Role.DECODE))
        new = cluster.generate("new", max_tokens=50)
        await cluster.link(p, d1)
        await cluster.settle()
        starts = d1.got(StartDecode)
        assert (
            len(starts) == 3
        )  # two replays (2 × 1 prefill worker), and the new one, which needs no replay's place
        assert [len(start.token_ids) for start in starts] == [7, 7, 3]
        for index in range(8):
            start = [each for each in d1.got(StartDecode) if len(each.token_ids) == 7][index]
            d1.grant(start)
            p.first(await p.expect(StartPrefill), C)
            d1.started(start, C)
            await cluster.settle()
        assert len(d1.got(StartDecode)) == 9
        for client, _ in running:
            assert client.ids() == [A, B, C]
            client.generation.close()
        new.generation.close()


# --- rows 16, 17: errors of steps and rows


@virtual
async def test_two_strikes_end_a_request_as_internal_and_the_worker_is_told_of_the_first() -> None:
    async with Cluster() as cluster:
        p, d = await cluster.pair()
        client, start, _ = await until_prefill(cluster, p, d)
        d.fail(start, StepFailed("step raised"))
        again = await d.expect(StartDecode)
        assert start.num_strikes == 0 and again.num_strikes == 1
        d.fail(again, StepFailed("step raised"))
        await client.end()
        assert isinstance(client.error, RowFailed) and client.error.code.value == "INTERNAL"
        assert len(d.got(StartDecode)) == 2


@virtual
async def test_what_a_worker_computed_when_it_ended_itself_gets_a_strike_and_nothing_else() -> None:
    async with Cluster() as cluster:
        p, d = await cluster.pair()
        _, running = await until_running(cluster, p, d, max_tokens=50)
        waiting = cluster.generate("wait", max_tokens=50)
        d.say(Waiting((await d.expect(StartDecode)).handle, 0))
        await cluster.settle()
        d.say(Unsound(failure(StepFailed("its state isn't sound"))))
        d1 = await cluster.join(hello("d1", Role.DECODE))
        await cluster.link(p, d1)
        again = {len(start.token_ids): start.num_strikes for start in d1.got(StartDecode)}
        assert again == {len(running.token_ids) + 2: 1, len("wait"): 0}
        assert [worker.id for worker in cluster.app.status().workers] == ["p0", "d1"]
        assert not waiting.done


@virtual
async def test_a_prompt_being_computed_where_a_worker_ended_itself_gets_a_strike() -> None:
    async with Cluster() as cluster:
        p, d = await cluster.pair()
        _, start, prefill = await until_prefill(cluster, p, d)
        p.progress(prefill, Phase.PREFILLING, 2)
        _, queued, _ = await until_prefill(cluster, p, d)
        await cluster.settle()
        p.say(Unsound(failure(StepFailed("its state isn't sound"))))
        for each in (start, queued):  # the verdict rule holds: D says how the attempts ended
            d.fail(each, WorkerLost("link ended"))
        p1 = await cluster.prefill("p1")
        await cluster.link(p1, d)
        assert sorted(each.num_strikes for each in d.got(StartDecode)[2:]) == [0, 1]


@virtual
async def test_a_killed_worker_s_requests_get_no_strike() -> None:
    async with Cluster() as cluster:
        p, d = await cluster.pair()
        await until_running(cluster, p, d, max_tokens=50)
        d.die()
        d1 = await cluster.join(hello("d1", Role.DECODE))
        await cluster.link(p, d1)
        assert (await d1.expect(StartDecode)).num_strikes == 0


@virtual
async def test_an_error_of_one_row_is_never_replayed() -> None:
    async with Cluster() as cluster:
        p, d = await cluster.pair()
        client, start = await until_running(cluster, p, d)
        d.fail(start, RowFailed("NaN logits"))
        await client.end()
        assert isinstance(client.error, RowFailed) and client.ids() == [A, B]


# --- row 18: revoked, preempted, handed back


@virtual
async def test_revocations_and_hand_backs_are_not_counted_and_keep_their_age() -> None:
    async with Cluster() as cluster:
        p, d = await cluster.pair()
        client = cluster.generate("hello", max_tokens=4)
        for _ in range(5):
            start = await d.expect(StartDecode)
            d.grant(start)
            prefill = await p.expect(StartPrefill)
            await cluster.settle(0.1)
            d.fail(start, Revoked("for older ones"))
            assert (await p.expect(Abort)).handle == prefill.handle
        start = await d.expect(StartDecode)
        assert start.age_s == pytest.approx(5 * 0.104, abs=0.05)
        d.grant(start)
        p.first(await p.expect(StartPrefill), A)
        d.started(start, A)
        d.fail(start, HandedBack("too long to recompute"))
        await serve(p, d, B, C, D)
        await client.end()
        assert client.ids() == [A, B, C, D] and client.finished().num_attempts == 1


@virtual
async def test_a_preempted_sequence_may_take_its_time() -> None:
    async with Cluster() as cluster:
        p, d = await cluster.pair()
        client, start = await until_running(cluster, p, d, max_tokens=3)
        d.progress(start, Phase.PREEMPTED, 7)
        await cluster.advance(60)
        d.progress(start, Phase.RUNNING, 7)
        d.tokens(start, 7, C)
        d.finished(start, 8)
        await client.end()
        assert client.ids() == [A, B, C]
