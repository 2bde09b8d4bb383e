"""Any settings together, in small pools, over workers that are killed twice: every answer is the rule's."""

from __future__ import annotations

import asyncio
import random

import pytest

from pdserve.completion import Completion
from pdserve.engine import fake_rule
from pdserve.messages import Role
from pdserve.request import GenerateRequest
from pdserve.sampling import SamplingParams
from pdserve.service.config import Config, EngineConfig
from pdserve.service.router_config import RouterConfig
from pdserve.structure import Structure
from tests.simulation.asking_for import ask, expected, served
from tests.simulation.cluster import SimCluster

NUM_REQUESTS = 12
SPAN_S = 1.5
PREFIX = tuple(b"Once upon a time, in a land far away, ")


def draw_request(source: random.Random) -> GenerateRequest:
    """Settings that the fake engine acts on, or that travel with the tokens."""

    def maybe(chance: float) -> bool:
        return source.random() < chance

    prompt = tuple(source.choices(range(32, 127), k=source.randint(1, 60)))
    if maybe(0.5):
        prompt = PREFIX + prompt
    letters = list(fake_rule.ALPHABET)
    structure = draw_choices(source, letters) if maybe(0.25) else None
    n = source.choice((1, 1, 1, 2, 3))
    sampling = SamplingParams(
        temperature=0.0 if maybe(0.3) else 1.0,
        max_tokens=source.randint(1, 40),
        structure=structure,
        # With a structure these might leave nothing.
        allowed_token_ids=tuple(source.sample(letters, 9)) if structure is None and maybe(0.2) else (),
        banned_token_ids=tuple(source.sample(letters, 5)) if structure is None and maybe(0.3) else (),
        bad_words=tuple("".join(map(chr, source.sample(letters, 2))) for _ in range(20))
        if structure is None and maybe(0.3)
        else (),
        stop_token_ids=tuple(source.sample(letters, 4)) if structure is None and maybe(0.4) else (),
        logprobs=source.choice((None, 0, 3)),
        prompt_logprobs=source.choice((None, None, 0, 2)),
    )
    return GenerateRequest(
        input=prompt, sampling=sampling, seed=source.randrange(1, 1 << 32), n=n, echo=maybe(0.2)
    )


def draw_choices(source: random.Random, letters: list[int]) -> Structure:
    """Texts that begin alike, some of them the beginning of others."""
    common = "".join(map(chr, source.choices(letters, k=source.randint(0, 20))))
    texts = {common + "".join(map(chr, source.choices(letters, k=source.randint(1, 25)))) for _ in range(6)}
    cut = {text[: source.randint(1, len(text))] for text in texts}
    return Structure.choices(sorted(texts | cut))


def check(request: GenerateRequest, answer: Completion) -> None:
    assert isinstance(request.input, tuple)
    for choice in range(request.n):
        token_ids, logprobs = expected(request, request.input, choice)
        assert answer.choices[choice].token_ids == token_ids
        assert answer.choices[choice].logprobs == logprobs
    top = request.prompt_logprobs
    scores = () if top is None else fake_rule.expected_prompt_logprobs(request.input, top)
    assert answer.prompt_logprobs == scores
    assert answer.prompt_text == (bytes(request.input).decode() if request.echo else "")


@pytest.mark.parametrize("seed", range(16))
def test_settings_at_random(seed: int) -> None:
    source = random.Random(f"fields/{seed}")
    workers = [("p0", Role.PREFILL), ("p1", Role.PREFILL), ("d0", Role.DECODE), ("d1", Role.DECODE)]
    if source.random() < 0.3:
        workers.append(("b0", Role.BOTH))
    config = Config(
        engine=EngineConfig(max_step_tokens=source.choice((9, 24, 512)), max_batch=source.choice((2, 8))),
        router=RouterConfig(allow_local_prefill=source.random() < 0.3),
    )
    requests = [draw_request(source) for _ in range(NUM_REQUESTS)]
    arrivals_s = [SPAN_S * source.random() for _ in requests]
    kills = [(SPAN_S * source.random(), source.choice(workers)[0]) for _ in range(2)]

    async def talk(cluster: SimCluster) -> list[Completion]:
        async def arrive(request: GenerateRequest, after_s: float) -> Completion:
            await asyncio.sleep(after_s)
            return await ask(cluster, request)

        async def kill(after_s: float, victim: str) -> None:
            await asyncio.sleep(after_s)
            cluster.workers[victim].kill()
            await asyncio.sleep(0.5)
            cluster.workers[victim].start()

        async with asyncio.TaskGroup() as group:
            answering = [
                group.create_task(arrive(request, after_s))
                for request, after_s in zip(requests, arrivals_s, strict=True)
            ]
            for after_s, victim in kills:
                group.create_task(kill(after_s, victim))
        await asyncio.sleep(2)
        return [task.result() for task in answering]

    answers = served(tuple(workers), talk, config=config, num_blocks=source.choice((12, 20, 64)))
    for request, answer in zip(requests, answers, strict=True):
        check(request, answer)
