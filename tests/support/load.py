"""Clients that ask one question after another, until they are told to stop; every answer must be whole and right."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from random import Random
from types import TracebackType
from typing import Self

from pdserve.client import AsyncClient
from tests.support.asking import Question, ask


class SteadyLoad:
    """An async context manager; its exit ends the clients, and raises what any of them met.

    targets  asked for before each question: where the routers are now
    served   worker → answers that it has decoded
    """

    def __init__(
        self, targets: Callable[[], Sequence[str]], random: Random, *, num_clients: int, max_tokens: int
    ) -> None:
        self._targets = targets
        self._random = random
        self._num_clients = num_clients
        self._max_tokens = max_tokens
        self._stop = asyncio.Event()
        self._group = asyncio.TaskGroup()
        self._more = asyncio.Condition()
        self.served: Counter[str] = Counter()

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        for _ in range(self._num_clients):
            self._group.create_task(self._ask_on())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        await self._group.__aexit__(kind, error, trace)

    async def _ask_on(self) -> None:
        while not self._stop.is_set():
            num_tokens = self._random.randrange(self._max_tokens // 4, self._max_tokens)
            question = Question.draw(self._random, self._random.randrange(10, 300), num_tokens)
            async with AsyncClient(self._targets()) as client:
                finished = await ask(client, question)
            async with self._more:
                self.served[finished.decode_worker] += 1
                self._more.notify_all()

    async def answers(self, worker: str | None = None, count: int = 5, *, limit_s: float = 100.0) -> None:
        """Return when so many more have come, of one decode worker or of all. Raises TimeoutError."""

        def so_far() -> int:
            return self.served.total() if worker is None else self.served[worker]

        wanted = so_far() + count
        async with asyncio.timeout(limit_s), self._more:
            await self._more.wait_for(lambda: so_far() >= wanted)
