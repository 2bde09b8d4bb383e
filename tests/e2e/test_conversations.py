"""Each turn of a conversation finds what earlier ones left in the prefix caches of its workers."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from pdserve.messages import Role
from pdserve.request import Chat, ChatMessage
from pdserve.sampling import SamplingParams
from pdserve.service.config import Config, EngineConfig
from pdserve.tokenizer import Tokenizer
from tests.support.serving import AGGREGATED, ONE_PAIR
from tests.support.torch_cluster import BLOCK_SIZE, Answer, Job, Record, Shape, Shelf, TorchCluster, play
from tests.unit.engine_torch.random_model import write_random_model

QUESTIONS = (
    "Tell me of the sea and of the ships on it.",
    "And the wind?",
    "Then tell me of the harbour again.",
)
NUM_TOKENS = 21
# Tokens that are read back as they were written: the answer is text by the time it is part of the next prompt.
LETTERS = tuple(range(ord("a"), ord("z") + 1))


def conversation(folder: Path, workers: tuple[tuple[str, Role], ...]) -> Record:
    """Three turns, one after the other."""
    shelf = Shelf(folder, Tokenizer.fake(320), dtype="float32", deterministic=False)
    params = SamplingParams(max_tokens=NUM_TOKENS, allowed_token_ids=LETTERS)

    async def talk(cluster: TorchCluster) -> list[Answer]:
        messages = [ChatMessage("system", "You answer at once.")]
        answers = []
        for question in QUESTIONS:
            messages.append(ChatMessage("user", question))
            answers.append(await cluster.ask(Job(prompt=Chat(tuple(messages)), sampling=params, seed=5)))
            messages.append(ChatMessage("assistant", answers[-1].text))
        return answers

    engine = EngineConfig(dtype="float32", max_step_tokens=64)
    return play(shelf, Shape(config=Config(engine=engine), workers=workers, num_blocks=64), talk)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("model"))


def full(num_tokens: int) -> int:
    """Of so many tokens, those in full blocks."""
    return num_tokens // BLOCK_SIZE * BLOCK_SIZE


def check_turns(answers: list[Answer]) -> None:
    for earlier, later in pairwise(answers):
        assert later.prompt_ids[: len(earlier.ids)] == earlier.ids


def test_the_prefill_worker_computes_what_is_new_and_the_decode_worker_gets_what_it_lacks(
    folder: Path,
) -> None:
    """A prefill worker knows earlier prompts, a decode worker the answers as well, all but their last token."""
    record = conversation(folder, ONE_PAIR)
    first, *later = record.answers
    check_turns(record.answers)
    assert first.num_cached == 0
    assert [turn.num_cached for turn in later] == [full(len(turn.prompt_ids)) for turn in record.answers[:-1]]
    sent = -(-len(first.prompt_ids) // BLOCK_SIZE)
    for before, turn in zip(record.answers, later):
        held = full(len(before.ids) - 1) // BLOCK_SIZE
        sent += -(-len(turn.prompt_ids) // BLOCK_SIZE) - held
    assert record.received_blocks == sent


def test_a_worker_that_does_both_knows_its_answers_too(folder: Path) -> None:
    record = conversation(folder, AGGREGATED)
    check_turns(record.answers)
    assert [turn.num_cached for turn in record.answers] == [
        0,
        *(full(len(turn.ids) - 1) for turn in record.answers[:-1]),
    ]
