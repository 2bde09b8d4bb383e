"""Sends a plan's requests and notes when what came: at their moments, or so that a fixed number runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Protocol

from pdserve.bench.plan import Planned
from pdserve.clock import Clock
from pdserve.errors import Code, PdserveError
from pdserve.request import Event, Finished, GenerateRequest, Started, Timings, Tokens

STOPPED = "STOPPED"
"""How a request ended that ran when the run was stopped."""


class Generates(Protocol):
    """What is measured: `AsyncClient`, and a script in tests."""

    def generate(
        self, request: GenerateRequest, *, deadline_s: float | None = None
    ) -> AsyncGenerator[Event, None]: ...


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """One request as its client saw it; moments in seconds since the run's begin.

    planned_s   when it should have been sent; sent_s: when it was
    token_s     of each event with tokens; num_tokens: of all of them
    code        "OK", the status of its error, or STOPPED
    timings     the router's, of a request that finished; num_cached: prompt tokens that weren't computed
    """

    planned_s: float
    num_prompt: int
    sent_s: float
    ended_s: float = 0.0
    token_s: list[float] = field(default_factory=list)
    num_tokens: int = 0
    num_cached: int = 0
    num_attempts: int = 0
    code: str = "OK"
    error: str = ""
    timings: Timings | None = None

    @property
    def is_ok(self) -> bool:
        return self.code == "OK"

    @property
    def ttft_s(self) -> float | None:
        return self.token_s[0] - self.sent_s if self.token_s else None

    @property
    def gaps_s(self) -> list[float]:
        """Between events that bring tokens: a user's wait, however many come at once."""
        return [later - earlier for earlier, later in zip(self.token_s, self.token_s[1:], strict=False)]

    @property
    def tpot_s(self) -> float | None:
        """Seconds a token after the first; None with one token."""
        return (self.token_s[-1] - self.token_s[0]) / (self.num_tokens - 1) if self.num_tokens > 1 else None


@dataclass(slots=True)
class Run:
    """What a run came to; seconds from its begin to the end of its last request."""

    outcomes: list[RequestRecord]
    seconds: float
    was_stopped: bool = False


class LoadDriver:
    """Runs one plan on the loop it is called from.

    concurrency  so many requests at a time, each next one when one ends; None = at their moments, whatever runs
    timeout_s    deadline of each request
    told         called whenever one has ended
    """

    def __init__(
        self,
        client: Generates,
        clock: Clock,
        *,
        concurrency: int | None = None,
        timeout_s: float | None = None,
        told: Callable[[RequestRecord], None] = lambda outcome: None,
    ) -> None:
        self._client = client
        self._clock = clock
        self._concurrency = concurrency
        self._timeout_s = timeout_s
        self._told = told
        self._begin_s = 0.0
        self._outcomes: list[RequestRecord] = []

    async def run(self, planned: Sequence[Planned], stop: asyncio.Event) -> Run:
        """All of it; once `stop` is set nothing more is sent, and what runs is cancelled."""
        self._begin_s = self._clock.now_s()
        self._outcomes = []
        sending = asyncio.ensure_future(self._send_all(planned))
        stopping = asyncio.ensure_future(stop.wait())
        try:
            await asyncio.wait((sending, stopping), return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
            sending.cancel()
            await asyncio.wait((sending, stopping))
        was_stopped = sending.cancelled()
        if not was_stopped:
            sending.result()
        return Run(self._outcomes, self._now_s(), was_stopped)

    async def _send_all(self, planned: Sequence[Planned]) -> None:
        async with asyncio.TaskGroup() as group:
            if self._concurrency is not None:
                waiting = iter(planned)
                for _ in range(min(self._concurrency, len(planned))):
                    group.create_task(self._one_after_another(waiting))
                return
            loop = asyncio.get_running_loop()
            for each in planned:
                due = asyncio.Event()
                handle = loop.call_later(max(0.0, each.at_s - self._now_s()), due.set)
                try:
                    await due.wait()
                finally:
                    handle.cancel()
                group.create_task(self._send(each, each.at_s))

    async def _one_after_another(self, waiting: Iterator[Planned]) -> None:
        for each in waiting:
            await self._send(each, self._now_s())

    async def _send(self, planned: Planned, planned_s: float) -> None:
        prompt = planned.request.input
        outcome = RequestRecord(
            planned_s=planned_s,
            num_prompt=len(prompt) if isinstance(prompt, tuple) else 0,
            sent_s=self._now_s(),
        )
        self._outcomes.append(outcome)
        try:
            events = self._client.generate(planned.request, deadline_s=self._timeout_s)
            async with aclosing(events):
                async for event in events:
                    self._take(event, outcome)
        except PdserveError as error:
            outcome.code, outcome.error = error.code.value, str(error)
        except asyncio.CancelledError:
            outcome.code = STOPPED
            raise
        finally:
            outcome.ended_s = self._now_s()
            self._told(outcome)

    def _take(self, event: Event, outcome: RequestRecord) -> None:
        match event:
            case Started():
                outcome.num_cached = event.num_cached_tokens
            case Tokens():
                outcome.token_s.append(self._now_s())
                outcome.num_tokens += len(event.token_ids)
            case Finished():
                outcome.timings, outcome.num_attempts = event.timings, event.num_attempts
                outcome.num_cached = event.usage.num_cached_tokens

    def _now_s(self) -> float:
        return self._clock.now_s() - self._begin_s


REFUSED = (Code.RESOURCE_EXHAUSTED.value,)
"""Codes of requests that the cluster wouldn't take: it said so, and when to come again."""
