"""Prompt logprobs come from the prefill worker and stand before the first token, whoever says that one first."""

from __future__ import annotations

from pdserve.errors import WorkerLost
from pdserve.messages import (
    Abort,
    DecodeStarted,
    FirstToken,
    PromptLogprobs,
    SequenceFinished,
    StartDecode,
    StartPrefill,
    Step,
    StepTokens,
)
from pdserve.request import Finished, Prompt, Started, Tokens
from pdserve.response import Energy
from pdserve.sampling import FinishReason, TokenLogprobs
from tests.unit.router.conversation import A, B, until_prefill
from tests.unit.router.scripted import Client, Cluster, ScriptedWorker, virtual

SCORES = tuple(TokenLogprobs(-0.5 * n, ((n, -0.25),)) for n in range(1, 5))  # "hello" has five tokens
LOGPROBS = (TokenLogprobs(-1.0), TokenLogprobs(-2.0))


def scores(worker: ScriptedWorker, handle: int, first: int, last: int) -> None:
    worker.say(PromptLogprobs(handle, first, SCORES[first - 1 : last]))


def first(worker: ScriptedWorker, start: StartPrefill, logprobs: TokenLogprobs | None = None) -> None:
    worker.say(
        FirstToken(
            handle=start.handle,
            token_id=A,
            logprobs=logprobs,
            reason=None,
            num_cached_tokens=0,
            queue_s=0,
            prefill_s=0,
        )
    )


def check(client: Client) -> None:
    """All is there, once, in order."""
    kinds = [type(event) for event in client.events]
    assert kinds == [Started, Prompt, Tokens, Finished]
    (prompt,) = [event for event in client.events if isinstance(event, Prompt)]
    assert (prompt.first_index, prompt.token_ids, prompt.text) == (0, tuple(b"hello"), "")
    assert prompt.logprobs == SCORES
    assert client.ids() == [A, B]


@virtual
async def test_they_come_before_the_first_token() -> None:
    async with Cluster() as cluster:
        p, d = await cluster.pair()
        client, start, prefill = await until_prefill(cluster, p, d, max_tokens=2, prompt_logprobs=1)
        assert start.key.params.prompt_logprobs == prefill.key.params.prompt_logprobs == 1
        scores(p, start.handle, 1, 2)
        await cluster.settle()
        assert client.events == []
        scores(p, start.handle, 3, 4)
        first(p, prefill)
        d.started(start, A)
        d.tokens(start, 6, B)
        d.finished(start, 7)
        check(await client.end())


@virtual
async def test_what_the_decode_worker_says_is_held_until_they_are_here() -> None:
    async with Cluster() as cluster:
        p, d = await cluster.pair()
        client, start, _prefill = await until_prefill(cluster, p, d, max_tokens=2, prompt_logprobs=1)
        scores(p, start.handle, 1, 3)
        d.started(start, A)
        d.tokens(start, 6, B)
        d.finished(start, 7)
        await cluster.settle()
        assert client.events == []
        scores(p, start.handle, 4, 4)
        check(await client.end())
        assert client.finished().num_attempts == 1
        assert not d.got(Abort)


@virtual
async def test_a_prefill_worker_lost_before_the_last_of_them_means_a_new_attempt() -> None:
    """Also where the hand-off has happened: nobody else knows them. Nothing was shown yet."""
    async with Cluster() as cluster:
        p, d = await cluster.pair()
        client, start, _ = await until_prefill(cluster, p, d, max_tokens=2, prompt_logprobs=1)
        scores(p, start.handle, 1, 3)
        d.started(start, A)
        await cluster.settle()
        p.die()
        assert (await d.expect(Abort)).handle == start.handle
        p = await cluster.prefill("p1")
        await cluster.link(p, d)
        again = await d.expect(StartDecode)
        d.grant(again)
        prefill = await p.expect(StartPrefill)
        assert prefill.key.params.prompt_logprobs == 1
        scores(p, again.handle, 1, 4)
        first(p, prefill)
        d.started(again, A)
        d.tokens(again, 6, B)
        d.finished(again, 7)
        check(await client.end())
        assert client.finished().num_attempts == 2


@virtual
async def test_later_attempts_and_later_choices_dont_ask_again() -> None:
    async with Cluster() as cluster:
        p, d = await cluster.pair()
        client, start, prefill = await until_prefill(cluster, p, d, max_tokens=2, prompt_logprobs=1, n=2)
        scores(p, start.handle, 1, 4)
        first(p, prefill)
        d.started(start, A)
        other = await d.expect(StartDecode)
        assert other.key.choice == 1
        assert other.key.params.prompt_logprobs is None
        d.fail(start, WorkerLost("gone"))
        again = await d.expect(StartDecode)
        assert (again.key.choice, again.token_ids) == (0, (*b"hello", A))
        assert again.key.params.prompt_logprobs is None
        client.generation.close()


@virtual
async def test_a_first_token_before_them_is_a_bug_of_the_worker() -> None:
    async with Cluster() as cluster:
        p, d = await cluster.pair()
        client, start, prefill = await until_prefill(cluster, p, d, max_tokens=2, prompt_logprobs=1)
        scores(p, start.handle, 1, 3)
        first(p, prefill)
        await client.end()
        assert client.error is not None
        assert type(client.error).__name__ == "InvariantViolated"
        assert client.events == []


@virtual
async def test_others_than_asked_for_are_a_bug_of_the_worker() -> None:
    for begin, end in ((2, 4), (1, 9), (1, 0)):
        async with Cluster() as cluster:
            p, d = await cluster.pair()
            client, start, _ = await until_prefill(cluster, p, d, max_tokens=2, prompt_logprobs=1)
            p.say(PromptLogprobs(start.handle, begin, (*SCORES, *SCORES)[begin - 1 : end]))
            await client.end()
            assert type(client.error).__name__ == "InvariantViolated"
    async with Cluster() as cluster:
        p, d = await cluster.pair()
        client, start, _ = await until_prefill(cluster, p, d, max_tokens=2)
        scores(p, start.handle, 1, 4)
        await client.end()
        assert type(client.error).__name__ == "InvariantViolated"


# --- logprobs of tokens


@virtual
async def test_logprobs_go_with_their_tokens_also_where_a_stop_string_holds_them_back() -> None:
    async with Cluster() as cluster:
        p, d = await cluster.pair()
        client, start, prefill = await until_prefill(cluster, p, d, max_tokens=9, logprobs=0, stop=("bcx",))
        first(p, prefill, TokenLogprobs(-1.0))
        d.say(
            DecodeStarted(
                handle=start.handle, first_token=A, logprobs=TokenLogprobs(-1.0), num_cached_tokens=0
            )
        )
        values = [TokenLogprobs(-float(n)) for n in range(2, 6)]
        d.say(Step((StepTokens(start.handle, 6, tuple(b"bc"), tuple(values[:2])),)))
        await cluster.settle()
        assert [token.logprobs for token in client.tokens()] == [(TokenLogprobs(-1.0),)]
        d.say(Step((StepTokens(start.handle, 8, tuple(b"de"), tuple(values[2:])),)))
        await cluster.settle()
        assert client.ids() == list(b"abcde")
        got = [each for event in client.tokens() for each in event.logprobs]
        assert got == [TokenLogprobs(-float(n)) for n in range(1, 6)]
        client.generation.close()


@virtual
async def test_a_token_without_the_logprobs_asked_for_is_a_bug_of_the_worker() -> None:
    async with Cluster() as cluster:
        p, d = await cluster.pair()
        client, _start, prefill = await until_prefill(cluster, p, d, max_tokens=2, logprobs=0)
        first(p, prefill)
        await client.end()
        assert type(client.error).__name__ == "InvariantViolated"


# --- energy


@virtual
async def test_energy_adds_up_over_attempts_and_is_absent_where_nobody_can_tell() -> None:
    async with Cluster() as cluster:
        p, d = await cluster.pair()
        client, start, prefill = await until_prefill(cluster, p, d, max_tokens=3)
        p.say(
            FirstToken(
                handle=prefill.handle, token_id=A, logprobs=None, reason=None, num_cached_tokens=0, queue_s=0,
                prefill_s=0, energy_j=4.0,
            )
        )  # fmt: skip
        d.started(start, A)
        d.say(Step((StepTokens(start.handle, 6, (B,), energy_j=0.5),)))
        await cluster.settle()
        d.fail(start, WorkerLost("gone"))
        again = await d.expect(StartDecode)
        d.grant(again)
        p.say(
            FirstToken(
                handle=again.handle, token_id=A, logprobs=None, reason=FinishReason.LENGTH, num_cached_tokens=0,
                queue_s=0, prefill_s=0, energy_j=3.0,
            )
        )  # fmt: skip
        await client.end()
        assert client.finished().energy == Energy(prefill_j=7.0, decode_j=0.5)
    async with Cluster() as cluster:
        p, d = await cluster.pair()
        client, start, prefill = await until_prefill(cluster, p, d, max_tokens=2)
        first(p, prefill)
        d.started(start, A)
        d.say(Step((StepTokens(start.handle, 6, (B,)),)))
        d.say(SequenceFinished(handle=start.handle, reason=FinishReason.LENGTH, num_tokens=7))
        await client.end()
        assert client.finished().energy is None
