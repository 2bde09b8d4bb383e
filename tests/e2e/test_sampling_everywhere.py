"""Every sampling setting gives the same answer wherever it runs: aggregated, disaggregated, preempted, replayed.

Whole clusters on a two-layer random model in deterministic mode: tokens, their logprobs and the prompt's are compared
bit for bit. Penalties that saw the wrong ids, or took replayed tokens for the prompt, would change the text.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pdserve.completion import Completion
from pdserve.engine.numerics import Precision
from pdserve.messages import Role
from pdserve.request import Event, GenerateRequest, Tokens
from pdserve.sampling import SamplingParams
from pdserve.service.config import Config, EngineConfig
from pdserve.tokenizer import Tokenizer
from tests.simulation.asking_for import ask
from tests.support.kernels import OWN_FIRST
from tests.support.torch_cluster import Answer, Record, Shape, Shelf, TorchCluster, play
from tests.unit.engine_torch.random_model import SMALL, WIDE, write_random_model

AGGREGATED = (("b0", Role.BOTH),)
ONE_PAIR = (("p0", Role.PREFILL), ("d0", Role.DECODE))
CONFIG = Config(engine=EngineConfig(deterministic=True, max_step_tokens=40, max_batch=8))
SOURCE = random.Random(11)
MAX_TOKENS = 24
RESTART_S = 0.7


def ids(count: int) -> tuple[int, ...]:
    return tuple(SOURCE.randrange(3, SMALL["vocab_size"]) for _ in range(count))


SETTINGS = [
    SamplingParams(temperature=0, repetition_penalty=1.8, logprobs=2),
    SamplingParams(temperature=0, frequency_penalty=1.5, presence_penalty=0.7, logprobs=0),
    SamplingParams(repetition_penalty=1.4, presence_penalty=1.1, frequency_penalty=-0.6, prompt_logprobs=1),
    SamplingParams(temperature=1.3, min_p=0.02, top_k=50, top_p=0.97, typical_p=0.95, logprobs=1),
    SamplingParams(
        temperature=0.9, logit_bias=((7, 6.0), (9, 6.5)), frequency_penalty=2.0, prompt_logprobs=0
    ),
    SamplingParams(
        allowed_token_ids=tuple(range(60, 120)), banned_token_ids=tuple(range(70, 90)), logprobs=5
    ),
    SamplingParams(
        temperature=0, bad_words=("A", "BC"), min_tokens=20, stop_token_ids=tuple(range(100, 160))
    ),
    SamplingParams(temperature=1.1, typical_p=0.5, repetition_penalty=0.7, logprobs=3, prompt_logprobs=3),
]
REQUESTS = [
    GenerateRequest(
        input=ids(20 + 13 * number),
        sampling=replace(params, max_tokens=MAX_TOKENS),
        seed=number + 1,
    )
    for number, params in enumerate(SETTINGS)
]


@pytest.fixture(scope="module", params=OWN_FIRST)
def shelf(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    """By the kernels that production takes, of the packaged model's widths, by which kernels choose their way."""
    folder: Path = write_random_model(tmp_path_factory.mktemp("model"), dtype=torch.bfloat16, **WIDE)
    precision: Precision = request.param
    return Shelf(folder, Tokenizer.fake(SMALL["vocab_size"]), dtype=precision.name, precision=precision)


def answers(
    shelf: Shelf,
    workers: tuple[tuple[str, Role], ...],
    num_blocks: int = 512,
    beside: Callable[[TorchCluster, asyncio.Event], Coroutine[None, None, None]] | None = None,
) -> tuple[list[Completion], Record]:
    """All requests at once. beside: runs meanwhile; told when some tokens have come."""
    found: list[Completion] = []

    async def talk(cluster: TorchCluster) -> list[Answer]:
        some_have_come = asyncio.Event()
        num_tokens = 0

        def count(event: Event) -> None:
            nonlocal num_tokens
            if isinstance(event, Tokens):
                num_tokens += len(event.token_ids)
                if num_tokens > MAX_TOKENS * 2:
                    some_have_come.set()

        async with asyncio.TaskGroup() as group:
            asking = [group.create_task(ask(cluster.sim, request, count)) for request in REQUESTS]
            if beside is not None:
                group.create_task(beside(cluster, some_have_come))
        found.extend(task.result() for task in asking)
        return []

    record = play(shelf, Shape(config=CONFIG, workers=workers, num_blocks=num_blocks), talk)
    return found, record


def essence(completion: Completion) -> tuple[object, ...]:
    (choice,) = completion.choices
    reason = choice.finished.reason
    return choice.token_ids, choice.text, choice.logprobs, completion.prompt_logprobs, reason


@pytest.fixture(scope="module")
def wanted(shelf: Shelf) -> list[tuple[object, ...]]:
    found, _ = answers(shelf, AGGREGATED)
    for request, completion in zip(REQUESTS, found, strict=True):
        params, choice = request.sampling, completion.choices[0]
        assert len(choice.logprobs) == (0 if params.logprobs is None else len(choice.token_ids))
        assert isinstance(request.input, tuple)
        assert len(completion.prompt_logprobs) == (
            0 if params.prompt_logprobs is None else len(request.input) - 1
        )
    return [essence(completion) for completion in found]


def test_alone(shelf: Shelf, wanted: list[tuple[object, ...]]) -> None:
    """One after the other, with nobody beside."""
    found: list[Completion] = []

    async def talk(cluster: TorchCluster) -> list[Answer]:
        found.extend([await ask(cluster.sim, each, lambda event: None) for each in REQUESTS])
        return []

    play(shelf, Shape(config=CONFIG, workers=ONE_PAIR, num_blocks=512), talk)
    assert [essence(completion) for completion in found] == wanted


def test_disaggregated(shelf: Shelf, wanted: list[tuple[object, ...]]) -> None:
    found, _ = answers(shelf, ONE_PAIR)
    assert [essence(completion) for completion in found] == wanted


@pytest.mark.parametrize("workers", [AGGREGATED, ONE_PAIR], ids=["aggregated", "disaggregated"])
def test_preempted(
    workers: tuple[tuple[str, Role], ...], shelf: Shelf, wanted: list[tuple[object, ...]]
) -> None:
    found, record = answers(shelf, workers, num_blocks=22)
    assert record.num_events.get("sequence.preempted", 0) > 0
    assert [essence(completion) for completion in found] == wanted


@pytest.mark.parametrize("victim", ["p0", "d0"])
def test_replayed(victim: str, shelf: Shelf, wanted: list[tuple[object, ...]]) -> None:
    async def strike(cluster: TorchCluster, some_have_come: asyncio.Event) -> None:
        await some_have_come.wait()
        cluster.workers[victim].kill()
        await asyncio.sleep(RESTART_S)
        cluster.workers[victim].start()

    found, _ = answers(shelf, ONE_PAIR, beside=strike)
    assert [essence(completion) for completion in found] == wanted
    if victim == "d0":
        assert sum(completion.finished.num_attempts for completion in found) > len(REQUESTS)
