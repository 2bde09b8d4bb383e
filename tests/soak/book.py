"""What the soak asks, and what it must be answered: drawn requests, each with the answer of an undisturbed run."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from random import Random

from pdserve.client import AsyncClient
from pdserve.completion import Completion, collect
from pdserve.request import Chat, ChatMessage, GenerateRequest, Input
from pdserve.sampling import FinishReason, SamplingParams
from pdserve.structure import Structure

_SHARED = 3  # beginnings that many prompts have in common
_LONGEST_PROMPT, _LONGEST_ANSWER = 380, 90
_SCHEMA = '{"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}'
_STRUCTURES = (
    None,
    None,
    None,
    Structure.json_schema(_SCHEMA),
    Structure.regex("[a-z ]{5,60}"),
    Structure.choices(("yes", "no", "perhaps")),
)
_WORDS = "river mill stone bread lamp seven under quickly and the of a where sings".split()

Answers = tuple[tuple[tuple[int, ...], str, FinishReason], ...]


@dataclass(frozen=True, slots=True)
class Page:
    """One request; its answers, choice by choice."""

    request: GenerateRequest
    answers: Answers

    @property
    def num_tokens(self) -> int:
        return sum(len(ids) for ids, _, _ in self.answers)

    def check(self, completion: Completion) -> None:
        """Raises AssertionError unless this is the undisturbed answer."""
        got = answers_of(completion)
        assert got == self.answers, f"another answer to {self.request}:\n{got}\ninstead of\n{self.answers}"

    def check_begins(self, ids: dict[int, list[int]]) -> None:
        """The same for an answer that was left before its end."""
        for choice, got in ids.items():
            want = self.answers[choice][0]
            assert tuple(got) == want[: len(got)], f"another beginning of {self.request}: {got}, not {want}"


def answers_of(completion: Completion) -> Answers:
    """What must be the same in every run."""
    return tuple((each.token_ids, each.text, each.finished.reason) for each in completion.choices)


async def write_book(
    client: AsyncClient, random: Random, num_pages: int, vocab_size: int, *, chats: bool
) -> list[Page]:
    """Draw requests, and ask each of them while nothing else happens."""
    beginnings = [_ids(random, vocab_size, 200) for _ in range(_SHARED)]
    requests = [_draw(random, vocab_size, beginnings, chats=chats) for _ in range(num_pages)]
    room = asyncio.Semaphore(4)

    async def page(request: GenerateRequest) -> Page:
        async with room:
            return Page(request, answers_of(await collect(client.generate(request))))

    return await asyncio.gather(*(page(request) for request in requests))


def _draw(
    random: Random, vocab_size: int, beginnings: list[tuple[int, ...]], *, chats: bool
) -> GenerateRequest:
    params = SamplingParams(
        temperature=random.choice((0.0, 0.7, 1.0)),
        top_p=random.choice((1.0, 0.9)),
        repetition_penalty=random.choice((1.0, 1.0, 1.2)),
        max_tokens=random.randint(1, _LONGEST_ANSWER),
        stop=random.choice(((), (), ("e",), ("th", "\n"))),
        structure=random.choice(_STRUCTURES),
        logprobs=random.choice((None, None, 0, 3)),
    )
    return GenerateRequest(
        input=_input(random, vocab_size, beginnings, chats=chats),
        seed=random.randrange(1 << 32),
        sampling=params,
        n=random.choice((1, 1, 1, 2)),
    )


def _input(random: Random, vocab_size: int, beginnings: list[tuple[int, ...]], *, chats: bool) -> Input:
    kind = random.choice(("ids", "shared", "text", "chat" if chats else "text"))
    if kind == "ids":
        return _ids(random, vocab_size, random.randint(1, _LONGEST_PROMPT))
    if kind == "shared":
        return (*random.choice(beginnings), *_ids(random, vocab_size, random.randint(1, 100)))
    text = " ".join(random.choices(_WORDS, k=random.randint(1, 60)))
    return text if kind == "text" else Chat((ChatMessage("user", text),))


def _ids(random: Random, vocab_size: int, count: int) -> tuple[int, ...]:
    return tuple(random.choices(range(3, vocab_size), k=count))
