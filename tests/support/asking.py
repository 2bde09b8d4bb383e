"""Clients of a cluster with the fake engine: what they ask, what they must be answered, and the state afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass
from random import Random

from pdserve.client import AsyncClient
from pdserve.engine import fake_rule
from pdserve.errors import PdserveError
from pdserve.operator_client import OperatorClient
from pdserve.request import Finished, GenerateRequest, Tokens
from pdserve.sampling import SamplingParams
from pdserve.status import ClusterStatus
from tests.support.waiting import until

QUIET_REPORTS = 3
DEADLINE_S = 100.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One request by token ids; its answer is a function of it."""

    prompt_ids: tuple[int, ...]
    max_tokens: int
    seed: int

    @classmethod
    def draw(cls, random: Random, num_prompt_tokens: int, max_tokens: int) -> Question:
        """Any prompt of this size."""
        prompt_ids = tuple(random.choices(range(1, 250), k=num_prompt_tokens))
        return cls(prompt_ids=prompt_ids, max_tokens=max_tokens, seed=random.randrange(1, 1 << 32))

    @property
    def request(self) -> GenerateRequest:
        return GenerateRequest(
            input=self.prompt_ids, seed=self.seed, sampling=SamplingParams(max_tokens=self.max_tokens)
        )

    @property
    def answer(self) -> list[int]:
        """What the fake engine's rule says."""
        return fake_rule.expected_tokens(self.prompt_ids, self.max_tokens, seed=self.seed)


async def ask(
    client: AsyncClient, question: Question, on_tokens: Callable[[int], None] = lambda num_tokens: None
) -> Finished:
    """Stream the answer to its end and check every token of it; `on_tokens` is told how many have come."""
    got: list[int] = []
    text = ""
    finished: Finished | None = None
    async with aclosing(client.generate(question.request, deadline_s=DEADLINE_S)) as events:
        async for event in events:
            match event:
                case Tokens():
                    assert event.first_index == len(got)
                    got.extend(event.token_ids)
                    text += event.text
                    on_tokens(len(got))
                case Finished():
                    finished = event
    assert got == question.answer
    assert text == bytes(got).decode("ascii")
    assert finished is not None
    return finished


async def at_rest(
    client: AsyncClient, worker_ids: Iterable[str], *, heartbeat_s: float = 0.5
) -> ClusterStatus:
    """Wait until these workers and no others are up and hold nothing for anybody, for several load reports in a row.

    Raises AssertionError with the router's status if it never is.
    """
    wanted = sorted(worker_ids)
    last: ClusterStatus | None = None
    num_quiet = 0

    async def look() -> ClusterStatus | None:
        nonlocal last, num_quiet
        last = await status_of(client)
        num_quiet = num_quiet + 1 if last is not None and is_at_rest(last, wanted) else 0
        if num_quiet < QUIET_REPORTS:
            await asyncio.sleep(heartbeat_s if num_quiet else 0)
            return None
        return last

    return await until(f"workers {wanted} at rest", look, told=lambda: str(last))


async def status_of(client: AsyncClient | OperatorClient) -> ClusterStatus | None:
    """The status, or None while the router doesn't answer."""
    try:
        return await client.status()
    except PdserveError:
        return None


def is_at_rest(status: ClusterStatus, worker_ids: list[str]) -> bool:
    """Exactly these workers are up, the queue is empty, and every block is FREE or CACHED."""
    if sorted(worker.id for worker in status.workers) != worker_ids:
        return False
    if status.queue.num_waiting or status.queue.num_running:
        return False
    for worker in status.workers:
        blocks = worker.blocks
        held = blocks.granted + blocks.owned + blocks.quarantined
        if (
            worker.state != "up"
            or held
            or not blocks.free + blocks.cached
            or worker.num_running
            or worker.num_waiting
        ):
            return False
    return True
