"""What a request may ask for, through router, prefill and decode worker, and through one worker that does both."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from pdserve.completion import Completion
from pdserve.engine import fake_rule
from pdserve.engine.fake_runner import FakeRunner
from pdserve.engine.port import Row, RowOutput
from pdserve.errors import InvalidRequest
from pdserve.messages import Role
from pdserve.request import Event, Finished, GenerateRequest, Prompt, Started, Tokens
from pdserve.sampling import FinishReason, SamplingParams
from pdserve.service.config import Config, EngineConfig
from pdserve.service.router_config import RouterConfig
from pdserve.structure import Structure
from tests.simulation.asking_for import (
    AGGREGATED,
    ONE_PAIR,
    TWO_PAIRS,
    ask,
    expected,
    served,
)
from tests.simulation.cluster import SimCluster

PROMPT = tuple(b"The five boxing wizards jump quickly, said the quick brown fox to the lazy dog.")
WAYS = {"disaggregated": ONE_PAIR, "aggregated": AGGREGATED}
either_way = pytest.mark.parametrize("workers", WAYS.values(), ids=WAYS)
SMALL_CHUNKS = Config(engine=EngineConfig(max_step_tokens=17, max_batch=8, decode_prefill_tokens=16))


def request(seed: int = 5, **fields: object) -> GenerateRequest:
    params = replace(SamplingParams(max_tokens=30), **fields)  # type: ignore[arg-type]
    return GenerateRequest(input=PROMPT, sampling=params, seed=seed)


ASKED = {
    "allowed": request(allowed_token_ids=tuple(b"xyz")),
    "banned": request(banned_token_ids=tuple(b"abcdefghijklmnop")),
    "bad words": request(bad_words=("a", "e", "ab", "zz")),
    "min tokens": request(min_tokens=20, stop_token_ids=tuple(fake_rule.ALPHABET[:32])),
    "stop ids": request(stop_token_ids=tuple(b"abcdefgh")),
    "choices": request(
        structure=Structure.choices(("abcdefgh ijkl", "abcdefgh", "abcdefgh mnop")), stop_token_ids=tuple(b"z\n")
    ),
    "logprobs": request(logprobs=3),
    "its own logprob": request(logprobs=0),
    "all": request(
        logprobs=2, min_tokens=12, banned_token_ids=tuple(b"0123456789"), bad_words=("q", "xy"),
        stop_token_ids=tuple(b"ABCDEF"),
    ),
}  # fmt: skip


@either_way
@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
def test_the_answer_is_the_rules(asked: GenerateRequest, workers: tuple[tuple[str, Role], ...]) -> None:
    answer = served(workers, lambda cluster: ask(cluster, asked))
    assert (answer.token_ids, answer.choices[0].logprobs) == expected(asked, PROMPT)


def test_forbidden_ids_are_not_said() -> None:
    """The rule is the oracle above; this is what it must mean."""
    said = {name: set(expected(asked, PROMPT)[0]) for name, asked in ASKED.items()}
    assert said["allowed"] <= set(b"xyz")
    assert not said["banned"] & set(b"abcdefghijklmnop")
    assert not said["bad words"] & set(b"ae")
    tokens = bytes(expected(ASKED["bad words"], PROMPT)[0])
    assert b"zz" not in bytes(PROMPT) + tokens
    ended = expected(ASKED["min tokens"], PROMPT)[0]
    assert not set(ended[:19]) & set(fake_rule.ALPHABET[:32])
    assert ended[-1] in fake_rule.ALPHABET[:32]


# --- through faults


async def ask_and(cluster: SimCluster, asked: GenerateRequest, at_token: int, victim: str) -> Completion:
    """Kill a worker when so many tokens have come (0: as soon as it has begun); it comes back."""
    seen = 0
    struck = asyncio.Event()

    def count(event: Event) -> None:
        nonlocal seen
        if isinstance(event, Tokens):
            seen += len(event.token_ids)
            if seen >= at_token:
                struck.set()

    async def strike() -> None:
        if at_token:
            await struck.wait()
        else:
            await asyncio.sleep(0.01)
        cluster.workers[victim].kill()
        await asyncio.sleep(0.5)
        cluster.workers[victim].start()

    async with asyncio.TaskGroup() as group:
        striking = group.create_task(strike())
        answer = await ask(cluster, asked, count)
        await striking
    await asyncio.sleep(2)
    return answer


@pytest.mark.parametrize("victim", ["p0", "d0"])
@pytest.mark.parametrize("at_token", [0, 1, 9, 14])
def test_a_killed_worker_changes_nothing(victim: str, at_token: int) -> None:
    asked = ASKED["all"]
    answer = served(ONE_PAIR, lambda cluster: ask_and(cluster, asked, at_token, victim))
    assert (answer.token_ids, answer.choices[0].logprobs) == expected(asked, PROMPT)


def test_preemption_changes_nothing() -> None:
    """Eight answers at once in a pool that holds less than three of them at their end."""
    asked = [
        request(seed, max_tokens=60, logprobs=2, bad_words=("a",), min_tokens=50, banned_token_ids=(70,))
        for seed in range(8)
    ]

    async def talk(cluster: SimCluster) -> list[Completion]:
        return await asyncio.gather(*[ask(cluster, each) for each in asked])

    for workers in (ONE_PAIR, AGGREGATED):
        for each, answer in zip(asked, served(workers, talk, num_blocks=24), strict=True):
            assert (answer.token_ids, answer.choices[0].logprobs) == expected(each, PROMPT)


# --- the prompt


def check_prompt(answer: Completion, events: list[Event], top: int, prompt: tuple[int, ...] = PROMPT) -> None:
    """All of the prompt's logprobs have come, each once, before any token."""
    assert answer.prompt_logprobs == fake_rule.expected_prompt_logprobs(prompt, top)
    kinds = [type(event) for event in events]
    assert kinds[0] is Started
    behind = next(at for at, kind in enumerate(kinds) if kind in (Tokens, Finished))
    assert Prompt not in kinds[behind:]
    parts = [event for event in events if isinstance(event, Prompt)]
    assert tuple(token for part in parts for token in part.token_ids) == prompt


@either_way
@pytest.mark.parametrize("chunks", [None, SMALL_CHUNKS], ids=["one chunk", "small chunks"])
def test_prompt_logprobs(workers: tuple[tuple[str, Role], ...], chunks: Config | None) -> None:
    """The second request finds the prompt in the prefix cache, and must not use it."""
    asked = request(prompt_logprobs=2)
    events: list[Event] = []

    async def talk(cluster: SimCluster) -> Completion:
        await ask(cluster, request())
        return await ask(cluster, asked, events.append)

    answer = served(workers, talk, config=chunks)
    check_prompt(answer, events, 2)
    assert answer.token_ids == expected(asked, PROMPT)[0]
    assert answer.started.num_cached_tokens == 0


@either_way
def test_a_prompt_of_one_token_has_no_logprobs(workers: tuple[tuple[str, Role], ...]) -> None:
    asked = replace(request(prompt_logprobs=2), input=(65,), echo=True)
    answer = served(workers, lambda cluster: ask(cluster, asked))
    assert (answer.prompt_text, answer.prompt_logprobs) == ("A", ())
    assert answer.token_ids == expected(asked, (65,))[0]


@pytest.mark.parametrize("n", [1, 3])
def test_choices_share_one_prompt(n: int) -> None:
    asked = replace(request(prompt_logprobs=1, logprobs=1), n=n)
    events: list[Event] = []
    answer = served(ONE_PAIR, lambda cluster: ask(cluster, asked, events.append))
    check_prompt(answer, events, 1)
    for choice in range(n):
        done = answer.choices[choice]
        assert (done.token_ids, done.logprobs) == expected(asked, PROMPT, choice)


@pytest.mark.parametrize("victim", ["p0", "d0"])
@pytest.mark.parametrize("at_token", [0, 1, 9])
def test_prompt_logprobs_outlive_a_killed_worker(victim: str, at_token: int) -> None:
    asked = request(prompt_logprobs=2, logprobs=1)
    answer = served(ONE_PAIR, lambda cluster: ask_and(cluster, asked, at_token, victim), config=SMALL_CHUNKS)
    assert answer.prompt_logprobs == fake_rule.expected_prompt_logprobs(PROMPT, 2)
    assert (answer.token_ids, answer.choices[0].logprobs) == expected(asked, PROMPT)


@either_way
def test_prompt_logprobs_in_a_tight_pool(workers: tuple[tuple[str, Role], ...]) -> None:
    asked = [request(seed, max_tokens=60, prompt_logprobs=1) for seed in range(6)]

    async def talk(cluster: SimCluster) -> list[Completion]:
        return await asyncio.gather(*[ask(cluster, each) for each in asked])

    for each, answer in zip(asked, served(workers, talk, num_blocks=20, config=SMALL_CHUNKS), strict=True):
        assert answer.prompt_logprobs == fake_rule.expected_prompt_logprobs(PROMPT, 1)
        assert answer.token_ids == expected(each, PROMPT)[0]


@either_way
@pytest.mark.parametrize("n", [1, 3])
def test_scoring_generates_nothing(workers: tuple[tuple[str, Role], ...], n: int) -> None:
    asked = replace(request(max_tokens=0, prompt_logprobs=2), n=n, echo=True)
    events: list[Event] = []
    answer = served(workers, lambda cluster: ask(cluster, asked, events.append), config=SMALL_CHUNKS)
    check_prompt(answer, events, 2)
    assert answer.prompt_logprobs == fake_rule.expected_prompt_logprobs(PROMPT, 2)
    assert [done.token_ids for done in answer.choices] == [()] * n
    for done in answer.choices:
        usage = done.finished.usage
        assert (usage.num_prompt_tokens, usage.num_completion_tokens) == (len(PROMPT), 0)
        assert (done.text, done.finished.reason, done.finished.kv_bytes) == ("", FinishReason.LENGTH, 0)
        timings = done.finished.timings
        assert 0 < timings.ttft_ms == timings.total_ms


@pytest.mark.parametrize("victim", ["p0", "d0"])
def test_scoring_outlives_a_killed_worker(victim: str) -> None:
    asked = request(max_tokens=0, prompt_logprobs=1)
    answer = served(ONE_PAIR, lambda cluster: ask_and(cluster, asked, 0, victim), config=SMALL_CHUNKS)
    assert answer.prompt_logprobs == fake_rule.expected_prompt_logprobs(PROMPT, 1)
    assert answer.token_ids == ()


@either_way
def test_echo(workers: tuple[tuple[str, Role], ...]) -> None:
    asked = replace(request(logprobs=1), echo=True)
    events: list[Event] = []
    answer = served(workers, lambda cluster: ask(cluster, asked, events.append))
    check_prompt(answer, events, 1)
    assert answer.prompt_text == bytes(PROMPT).decode()
    plain = replace(asked, sampling=replace(asked.sampling, logprobs=None))
    answer = served(workers, lambda cluster: ask(cluster, plain))
    assert (answer.prompt_text, answer.prompt_logprobs) == (bytes(PROMPT).decode(), ())


def test_a_long_prompt_comes_in_parts() -> None:
    prompt = PROMPT * 40
    asked = replace(request(prompt_logprobs=1), input=prompt, echo=True)
    events: list[Event] = []
    answer = served(ONE_PAIR, lambda cluster: ask(cluster, asked, events.append), num_blocks=512)
    check_prompt(answer, events, 1, prompt)
    assert answer.prompt_text == bytes(prompt).decode()
    assert sum(isinstance(event, Prompt) for event in events) == 4


# --- choices


@either_way
@pytest.mark.parametrize(("n", "best_of"), [(1, 4), (2, 5), (3, 3)])
def test_best_of(workers: tuple[tuple[str, Role], ...], n: int, best_of: int) -> None:
    asked = replace(request(logprobs=0), n=n, best_of=best_of)
    answer = served(workers, lambda cluster: ask(cluster, asked))
    all_choices = [expected(asked, PROMPT, choice) for choice in range(best_of)]
    if best_of > n:
        all_choices.sort(key=lambda choice: -sum(each.logprob for each in choice[1]))
    assert [(done.token_ids, done.logprobs) for done in answer.choices] == all_choices[:n]
    assert [done.finished.choice for done in answer.choices] == list(range(n))


def test_best_of_shows_no_logprobs_unless_asked() -> None:
    asked = replace(request(), best_of=3)
    answer = served(ONE_PAIR, lambda cluster: ask(cluster, asked))
    compared = replace(asked, sampling=replace(asked.sampling, logprobs=0))
    best = max(
        (expected(compared, PROMPT, choice) for choice in range(3)),
        key=lambda choice: sum(each.logprob for each in choice[1]),
    )
    assert (answer.token_ids, answer.choices[0].logprobs) == (best[0], ())


# --- a lost router


@pytest.mark.parametrize("fields", [{"n": 2}, {"best_of": 3}, {"echo": True}], ids=str)
@pytest.mark.parametrize("after_s", [0.02, 0.06, 0.15, 0.3])
def test_the_next_router_goes_on(fields: dict[str, int], after_s: float) -> None:
    asked = replace(request(max_tokens=60, logprobs=1, prompt_logprobs=2), **fields)  # type: ignore[arg-type]
    events: list[Event] = []

    async def talk(cluster: SimCluster) -> Completion:
        async with asyncio.TaskGroup() as group:
            answering = group.create_task(ask(cluster, asked, events.append))
            await asyncio.sleep(after_s)
            cluster.routers["r0"].kill()
        return answering.result()

    answer = served(TWO_PAIRS, talk, router_ids=("r0", "r1"), config=SMALL_CHUNKS, num_blocks=128)
    check_prompt(answer, events, 2)
    if asked.best_of is None:
        for choice in range(asked.n):
            done = answer.choices[choice]
            assert done.token_ids == expected(asked, PROMPT, choice)[0]
            assert done.logprobs == expected(asked, PROMPT, choice)[1]


# --- the window


def refused(asked: GenerateRequest, *, num_blocks: int = 64, window_tokens: int = 1024) -> InvalidRequest:
    async def talk(sim: SimCluster) -> InvalidRequest:
        with pytest.raises(InvalidRequest) as caught:
            await ask(sim, asked)
        return caught.value

    return served(ONE_PAIR, talk, num_blocks=num_blocks, window_tokens=window_tokens)


@either_way
@pytest.mark.parametrize("pool_is_the_limit", [True, False])
def test_the_window(workers: tuple[tuple[str, Role], ...], pool_is_the_limit: bool) -> None:
    """At the limit and one below; one above is refused, naming both numbers. 96 tokens are 6 blocks."""
    num_blocks, window_tokens = (6, 1024) if pool_is_the_limit else (64, 96)
    for max_tokens in (96 - len(PROMPT) - 1, 96 - len(PROMPT)):
        asked = request(max_tokens=max_tokens)
        answer = served(
            workers,
            lambda cluster: ask(cluster, asked),  # noqa: B023
            num_blocks=num_blocks,
            window_tokens=window_tokens,
        )
        assert answer.token_ids == expected(asked, PROMPT)[0]
        assert answer.finished.reason is FinishReason.LENGTH
    above = request(max_tokens=96 - len(PROMPT) + 1)
    error = refused(above, num_blocks=num_blocks, window_tokens=window_tokens)
    assert (error.fields["limit"], error.fields["value"]) == (96, 97)


@either_way
def test_what_is_left_of_the_window(workers: tuple[tuple[str, Role], ...]) -> None:
    for length, left in ((95, 1), (94, 2)):
        prompt = (PROMPT * 2)[:length]
        asked = GenerateRequest(input=prompt, seed=3)
        answer = served(workers, lambda cluster: ask(cluster, asked), window_tokens=96)  # noqa: B023
        assert len(answer.token_ids) == left
    error = refused(GenerateRequest(input=(PROMPT * 2)[:96], seed=3), window_tokens=96)
    assert (error.fields["limit"], error.fields["value"], error.fields["max_tokens"]) == (96, 97, "unset")


@either_way
def test_truncation_only_when_asked_for(workers: tuple[tuple[str, Role], ...]) -> None:
    long = PROMPT * 3
    asked = replace(request(), input=long)
    assert refused(asked, window_tokens=96).fields["limit"] == 96
    for keep in (40, 66, 67):
        cut = replace(asked, truncate_prompt_tokens=keep, echo=True)
        if keep + 30 > 96:
            assert refused(cut, window_tokens=96).fields["value"] == 97
            continue
        answer = served(workers, lambda cluster: ask(cluster, cut), window_tokens=96)  # noqa: B023
        assert answer.started.prompt_token_ids == long[-keep:]
        assert answer.prompt_text == bytes(long[-keep:]).decode()
        assert answer.token_ids == expected(cut, long[-keep:])[0]
    whole = replace(request(), truncate_prompt_tokens=500)
    assert served(workers, lambda cluster: ask(cluster, whole)).started.prompt_token_ids == PROMPT


# --- what only the model can tell


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (request(allowed_token_ids=(5, 260)), "allowed_token_ids .*limit=259, value=260"),
        (request(banned_token_ids=(300,)), "banned_token_ids .*limit=259, value=300"),
        (request(logit_bias=((400, 1.0),)), "logit_bias .*limit=259, value=400"),
        (request(banned_token_ids=tuple(range(260))), "no token is left"),
        (request(allowed_token_ids=(256,), min_tokens=1), "no token is left"),
        (request(allowed_token_ids=tuple(b"ab"), bad_words=("a", "b")), "no token is left"),
    ],
)
def test_impossible_requests_are_refused(asked: GenerateRequest, said: str) -> None:
    error = refused(asked)
    with pytest.raises(InvalidRequest, match=said):
        raise error


def test_local_prefill_makes_prompt_logprobs_too() -> None:
    """A decode worker alone, with the prompt in its cache."""
    config = Config(router=RouterConfig(allow_local_prefill=True))
    asked = request(prompt_logprobs=3)
    events: list[Event] = []

    async def talk(cluster: SimCluster) -> Completion:
        await ask(cluster, request())
        return await ask(cluster, asked, events.append)

    answer = served((("d0", Role.DECODE),), talk, config=config)
    check_prompt(answer, events, 3)
    assert answer.token_ids == expected(asked, PROMPT)[0]


# --- energy


class Costly(FakeRunner):
    """Every row costs a joule a token."""

    def run(self, rows: Sequence[Row]) -> list[RowOutput]:
        return [
            replace(output, energy_j=float(len(row.token_ids)))
            for row, output in zip(rows, super().run(rows), strict=True)
        ]


@either_way
@pytest.mark.parametrize("stop", [(), ("XF",)], ids=["length", "stop string"])
def test_energy_of_a_request(workers: tuple[tuple[str, Role], ...], stop: tuple[str, ...]) -> None:
    """Also where the router ends the text, which no worker knows of."""
    asked = request(max_tokens=40, stop=stop)
    answer = served(
        workers,
        lambda cluster: ask(cluster, asked),
        make_runner=lambda worker_id, num_blocks, block_size: Costly(
            num_blocks=num_blocks, block_size=block_size, window_tokens=4096
        ),
    )
    finished = answer.finished
    assert finished.reason is (FinishReason.STOP_TEXT if stop else FinishReason.LENGTH)
    energy = finished.energy
    assert energy is not None and energy.prefill_j == len(PROMPT) and energy.decode_j is not None
    assert len(answer.token_ids) - 1 <= energy.decode_j < len(answer.token_ids) + 3  # overrun


def test_energy_that_nobody_can_tell_is_absent() -> None:
    finished = served(ONE_PAIR, lambda cluster: ask(cluster, request())).finished
    assert finished.energy is None
