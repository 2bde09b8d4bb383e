"""What a request wants its text to be, it is: aggregated, disaggregated, preempted, replayed, and with equal tokens.

Whole clusters on a two-layer random model in deterministic mode: the model knows nothing of JSON, so that only the
masks make it, and a matcher that stood elsewhere after a move would change the text or end it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pdserve.completion import Completion
from pdserve.engine.numerics import Precision
from pdserve.messages import Role
from pdserve.request import Event, GenerateRequest, Tokens
from pdserve.sampling import FinishReason, SamplingParams
from pdserve.service.config import Config, EngineConfig
from pdserve.tokenizer import Tokenizer
from tests.simulation.asking_for import ask
from tests.support.kernels import OWN_FIRST
from tests.support.structures import OTHERS, REGEXES, SCHEMAS, WISHES, Wish, of_schema
from tests.support.torch_cluster import Answer, Record, Shape, Shelf, TorchCluster, play
from tests.unit.engine_torch.random_model import SMALL, WIDE, write_random_model

AGGREGATED = (("b0", Role.BOTH),)
ONE_PAIR = (("p0", Role.PREFILL), ("d0", Role.DECODE))
CONFIG = Config(engine=EngineConfig(deterministic=True, max_step_tokens=40, max_batch=8))
NUM_SEEDS = 20
RESTART_S = 0.7
# A random model draws blanks and letters alike; without the blanks its JSON is short enough to watch it being moved.
NO_BLANKS = tuple(b" \t\r\n")
# Nor would it end a number within any limit.
LIKES_THE_END = tuple((end_id, 7.0) for end_id in Tokenizer.fake(SMALL["vocab_size"]).eos_token_ids)


@pytest.fixture(scope="module")
def small_shelf(tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    folder: Path = write_random_model(tmp_path_factory.mktemp("model"), dtype=torch.bfloat16)
    return Shelf(folder, Tokenizer.fake(SMALL["vocab_size"]), dtype="float32")


@pytest.fixture(scope="module", params=OWN_FIRST)
def shelf(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    """By the kernels that production takes, of the packaged model's widths, by which kernels choose their way."""
    folder: Path = write_random_model(tmp_path_factory.mktemp("model"), dtype=torch.bfloat16, **WIDE)
    precision: Precision = request.param
    return Shelf(folder, Tokenizer.fake(SMALL["vocab_size"]), dtype=precision.name, precision=precision)


def request(wish: Wish, seed: int, **fields: object) -> GenerateRequest:
    params = SamplingParams(
        structure=wish.structure,
        max_tokens=140,
        banned_token_ids=NO_BLANKS if wish.is_json else (),
        logit_bias=LIKES_THE_END,
        logprobs=0,
        temperature=0.9,
    )
    prompt = tuple(f"{wish.name} {seed}: ".encode())
    return GenerateRequest(input=prompt, sampling=replace(params, **fields), seed=seed)  # type: ignore[arg-type]


ONE_OF_EACH = [request(wish, seed) for seed, wish in enumerate(WISHES, start=1)]
STRING = {"type": "string", "minLength": 12, "maxLength": 16}
LONG = of_schema("long", {"type": "array", "items": STRING, "minItems": 5, "maxItems": 6}, 140)
LONG_ONES = [request(LONG, seed) for seed in range(1, 9)]


def answers(
    shelf: Shelf,
    workers: tuple[tuple[str, Role], ...],
    requests: list[GenerateRequest],
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
                if num_tokens > 4 * len(requests):
                    some_have_come.set()

        async with asyncio.TaskGroup() as group:
            asking = [group.create_task(ask(cluster.sim, each, count)) for each in requests]
            if beside is not None:
                group.create_task(beside(cluster, some_have_come))
        found.extend(task.result() for task in asking)
        return []

    record = play(shelf, Shape(config=CONFIG, workers=workers, num_blocks=num_blocks), talk)
    return found, record


def essence(completion: Completion) -> tuple[object, ...]:
    (choice,) = completion.choices
    return choice.token_ids, choice.text, choice.logprobs, choice.finished.reason


def check(wish: Wish, completion: Completion) -> None:
    for choice in completion.choices:
        assert choice.finished.reason in (FinishReason.STRUCTURE, FinishReason.EOS), choice.text
        assert wish.is_right(choice.text), choice.text


@pytest.mark.parametrize("wish", [*SCHEMAS, *REGEXES, *OTHERS], ids=str)
def test_twenty_texts_of_each_are_right(wish: Wish, small_shelf: Shelf) -> None:
    requests = [request(wish, seed) for seed in range(1, NUM_SEEDS + 1)]
    found, _ = answers(small_shelf, ONE_PAIR, requests)
    for completion in found:
        check(wish, completion)
    assert len({completion.text for completion in found}) > 1


@pytest.fixture(scope="module")
def wanted(shelf: Shelf) -> list[tuple[object, ...]]:
    found, _ = answers(shelf, AGGREGATED, ONE_OF_EACH)
    for wish, completion in zip(WISHES, found, strict=True):
        check(wish, completion)
    return [essence(completion) for completion in found]


@pytest.fixture(scope="module")
def wanted_long(shelf: Shelf) -> list[tuple[object, ...]]:
    found, _ = answers(shelf, AGGREGATED, LONG_ONES)
    for completion in found:
        check(LONG, completion)
        assert len(completion.token_ids) > 50
    return [essence(completion) for completion in found]


def test_alone(shelf: Shelf, wanted: list[tuple[object, ...]]) -> None:
    """One after the other, with nobody beside."""
    found: list[Completion] = []

    async def talk(cluster: TorchCluster) -> list[Answer]:
        found.extend([await ask(cluster.sim, each, lambda event: None) for each in ONE_OF_EACH])
        return []

    play(shelf, Shape(config=CONFIG, workers=ONE_PAIR, num_blocks=512), talk)
    assert [essence(completion) for completion in found] == wanted


def test_disaggregated(shelf: Shelf, wanted: list[tuple[object, ...]]) -> None:
    found, _ = answers(shelf, ONE_PAIR, ONE_OF_EACH)
    assert [essence(completion) for completion in found] == wanted


@pytest.mark.parametrize("workers", [AGGREGATED, ONE_PAIR], ids=["aggregated", "disaggregated"])
def test_preempted(
    workers: tuple[tuple[str, Role], ...], shelf: Shelf, wanted_long: list[tuple[object, ...]]
) -> None:
    found, record = answers(shelf, workers, LONG_ONES, num_blocks=12)
    assert record.num_events.get("sequence.preempted", 0) > 0
    assert [essence(completion) for completion in found] == wanted_long


@pytest.mark.parametrize("victim", ["p0", "d0"])
def test_replayed(victim: str, shelf: Shelf, wanted: list[tuple[object, ...]]) -> None:
    async def strike(cluster: TorchCluster, some_have_come: asyncio.Event) -> None:
        await some_have_come.wait()
        cluster.workers[victim].kill()
        await asyncio.sleep(RESTART_S)
        cluster.workers[victim].start()

    found, _ = answers(shelf, ONE_PAIR, ONE_OF_EACH, beside=strike)
    assert [essence(completion) for completion in found] == wanted
    if victim == "d0":
        assert sum(completion.finished.num_attempts for completion in found) > len(ONE_OF_EACH)


def test_each_choice_has_a_matcher_of_its_own(small_shelf: Shelf) -> None:
    wish = SCHEMAS[4]
    several = [replace(request(wish, 3), n=4), replace(request(wish, 3, logprobs=None), n=2, best_of=4)]
    found, _ = answers(small_shelf, ONE_PAIR, several)
    for completion, n in zip(found, (4, 2), strict=True):
        assert len({choice.text for choice in completion.choices}) == n
        check(wish, completion)
