"""A simulated client: one request, its events checked as they come, its resumption at another router."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from pdserve.engine import fake_rule
from pdserve.errors import Draining, InvalidRequest, PdserveError, RequestCancelled
from pdserve.request import Finished, GenerateRequest, Resume, ResumeChoice, Started, Tokens
from pdserve.sampling import FinishReason, SampleKey, SamplingParams
from router.app import RouterApp
from router.conductor import Conductor
from tests.simulation.plan import Plan
from tests.simulation.stage import Stage

LOOKS_AGAIN_S = 0.1  # between two looks for a router that takes requests
JUST_BEFORE_S = 1e-6
TOO_MANY_TOKENS = 100_000


@dataclass(slots=True)
class ClientLog:
    """What the client saw. `ends` must hold exactly one entry when all is over: "ok", or the error's class.

    routers  those that it asked, one after another
    """

    plan: Plan
    begun_s: float = 0.0
    ended_s: float = 0.0
    seed: int | None = None
    tokens: dict[int, list[int]] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    reasons: dict[int, FinishReason] = field(default_factory=dict)
    ends: list[str] = field(default_factory=list)
    error: PdserveError | None = None
    routers: list[str] = field(default_factory=list)
    cancelled_s: float | None = None
    is_deaf: bool = False

    @property
    def num_resumes(self) -> int:
        return max(0, len(self.routers) - 1)


class Client:
    """Runs one plan. on_cancel: told the handles of its attempts in the moment in which it goes."""

    def __init__(
        self, stage: Stage, plan: Plan, on_cancel: Callable[[list[int]], None] = lambda handles: None
    ) -> None:
        self.log = ClientLog(plan)
        self.generation: Conductor | None = None
        self.app: RouterApp | None = None  # the router that it reads from now
        self._stage = stage
        self._plan = plan
        self._on_cancel = on_cancel
        self._answers: dict[int, tuple[list[int], Iterator[int]]] = {}  # by choice: known so far, the rest
        self._given_up = asyncio.Event()
        self._hears_nothing = False

    async def run(self) -> None:
        """Until the request has ended for this client."""
        log, plan, loop = self.log, self._plan, asyncio.get_running_loop()
        log.begun_s = self._now_s()
        timers: list[asyncio.TimerHandle] = []
        if plan.cancel_after_s is not None:
            timers.append(loop.call_later(plan.cancel_after_s, self.cancel))
        if plan.deadline_s is not None:
            timers.append(loop.call_later(max(0.0, plan.deadline_s - JUST_BEFORE_S), self._count, 1))
        try:
            while not log.ends:
                await self._stream()
        finally:
            for timer in timers:
                timer.cancel()
            log.ended_s = self._now_s()
        if log.ends == ["ok"]:
            self._check_complete()

    async def _stream(self) -> None:
        """One stream to its end, which is the request's unless the router was lost."""
        try:
            await self._stream_once()
            self.log.ends.append("ok" if self.log.cancelled_s is None else "RequestCancelled")
        except _RouterLost:
            left_s = self._left_s()
            if left_s is not None and left_s < JUST_BEFORE_S:
                self.log.ends.append("DeadlineExceeded")
            else:
                await asyncio.sleep(LOOKS_AGAIN_S if left_s is None else min(LOOKS_AGAIN_S, left_s))
        except PdserveError as error:
            self.log.ends.append(type(error).__name__)
            self.log.error = error
            if isinstance(error, InvalidRequest):
                self._stage.coverage.add(2)

    def cancel(self) -> None:
        """The client goes away."""
        if self.log.ends or self.log.cancelled_s is not None:
            return
        self._count(1)
        if self.app is not None:
            self._on_cancel(self._stage.sight.handles_of(self.app, self.request_id))
        self.log.cancelled_s = self._now_s()
        if self.generation is not None:
            self.generation.close()

    def go_deaf(self) -> None:
        """The client stops reading until it is given up."""
        self.log.is_deaf = self._hears_nothing = True

    @property
    def request_id(self) -> str:
        """Of the stream that runs now; each router gets one of its own."""
        return f"{self._plan.name}.{len(self.log.routers)}"

    def _now_s(self) -> float:
        return self._stage.tape.now_s()

    def _count(self, row: int) -> None:
        """The row befalls the request in its phases of now."""
        if not self.log.ends and self.app is not None:
            phases = self._stage.sight.of_request(self.app, self.request_id)
            if phases or row != 1:
                self._stage.coverage.add(row, *phases)

    # --- asking

    def _request(self) -> GenerateRequest:
        plan, log = self._plan, self.log
        resume = None
        if log.seed is not None:
            choices = tuple(
                ResumeChoice(tuple(log.tokens.get(index, ())), log.reasons.get(index))
                for index in range(plan.n)
            )
            resume = Resume(seed=log.seed, choices=choices)
        return GenerateRequest(
            request_id=self.request_id,
            input=plan.prompt_ids,
            sampling=SamplingParams(
                temperature=0.0 if plan.greedy else 1.0,
                max_tokens=TOO_MANY_TOKENS if plan.is_bad else plan.max_tokens,
                stop=plan.stop,
            ),
            n=plan.n,
            priority=plan.priority,
            user=plan.user,
            resume=resume,
        )

    def _router(self) -> tuple[str, RouterApp] | None:
        """The router to ask: the planned one, or after a loss any that takes requests."""
        routers = self._stage.cluster.routers
        for router_id in (self._plan.router_id, *routers):
            app = routers[router_id].app
            if app is not None and not app.admission.draining:
                return router_id, app
        return None

    def _left_s(self) -> float | None:
        if self._plan.deadline_s is None:
            return None
        return max(0.0, self._plan.deadline_s - (self._now_s() - self.log.begun_s))

    async def _stream_once(self) -> None:
        """Raises _RouterLost if the client should go on elsewhere."""
        log, pause_s = self.log, self._plan.reads_slowly_s
        if log.cancelled_s is not None:
            raise RequestCancelled("gone while no router was there")
        found = self._router()
        if found is None:
            raise _RouterLost
        router_id, app = found
        log.routers.append(router_id)
        self.app = app
        generation = app.generate(self._request(), deadline_left_s=self._left_s())
        generation.on_stalled = self._stalled
        self.generation = generation
        try:
            async for event in generation:
                if isinstance(event, Started):
                    self._on_started(event)
                elif isinstance(event, Tokens):
                    self._on_tokens(event)
                elif isinstance(event, Finished):
                    self._on_finished(event)
                if pause_s and not self._given_up.is_set():
                    await asyncio.sleep(pause_s)
                if self._hears_nothing and len(log.reasons) < self._plan.n:
                    await self._stay_deaf()
        except PdserveError as error:
            if self._lost_router(router_id, app, error):
                raise _RouterLost from error
            raise
        finally:
            self.app = None

    async def _stay_deaf(self) -> None:
        """Until the router has given this client up, or has nothing for it."""
        try:
            async with asyncio.timeout(2 * self._stage.scenario.config.timeouts.client_stall_s):
                await self._given_up.wait()
        except TimeoutError:
            self._hears_nothing = False

    def _stalled(self) -> None:
        self._count(22)
        self._given_up.set()

    def _lost_router(self, router_id: str, app: RouterApp, error: PdserveError) -> bool:
        """Whether it was the router that went, not the request that failed."""
        if isinstance(error, Draining):
            return app.admission.draining
        stopped = isinstance(error, RequestCancelled) and error.message == "the router stops"
        return stopped and self._stage.cluster.routers[router_id].app is not app

    # --- events

    def _on_started(self, event: Started) -> None:
        if self.log.seed is not None and self.log.seed != event.seed:
            self._violated(f"the seed changed from {self.log.seed} to {event.seed}")
        self.log.seed = event.seed
        if event.num_prompt_tokens != len(self._plan.prompt_ids):
            self._violated(
                f"{event.num_prompt_tokens} prompt tokens, asked with {len(self._plan.prompt_ids)}"
            )

    def _on_tokens(self, event: Tokens) -> None:
        log = self.log
        tokens = log.tokens.setdefault(event.choice, [])
        if event.first_index != len(tokens):
            self._violated(f"choice {event.choice}: index {event.first_index} where {len(tokens)} was due")
        if event.choice in log.reasons:
            self._violated(f"choice {event.choice}: tokens after its end")
        tokens.extend(event.token_ids)
        log.texts[event.choice] = log.texts.get(event.choice, "") + event.text
        want = self._expected(event.choice, len(tokens))[event.first_index :]
        if want != list(event.token_ids):
            self._violated(
                f"choice {event.choice}: wrong text {_text(event.token_ids)!r}, want {_text(want)!r}"
            )

    def _on_finished(self, event: Finished) -> None:
        log = self.log
        if event.choice in log.reasons:
            if log.num_resumes == 0:
                self._violated(f"choice {event.choice} ended twice")
            return
        log.reasons[event.choice] = event.reason

    def _check_complete(self) -> None:
        for choice in range(self._plan.n):
            got = self.log.tokens.get(choice, [])
            want, text = _cut_at_stop(self._expected(choice, self._plan.max_tokens), self._plan.stop)
            if got != want:
                self._violated(f"choice {choice} is not whole: {len(got)} of {len(want)} tokens")
            if self.log.texts.get(choice, "") != text:
                self._violated(
                    f"choice {choice} has another text than its tokens: {self.log.texts.get(choice)!r}"
                )
            if choice not in self.log.reasons:
                self._violated(f"choice {choice} has no end")

    def _expected(self, choice: int, num_tokens: int) -> list[int]:
        """The first num_tokens tokens of the right answer, or all if it has fewer."""
        plan, seed = self._plan, self.log.seed
        if seed is None:
            self._violated("tokens before `started`")
            return []
        if choice not in self._answers:
            key = SampleKey(
                params=SamplingParams(temperature=0.0 if plan.greedy else 1.0),
                seed=seed,
                choice=choice,
                eos_token_ids=(fake_rule.EOS_ID,),
                max_tokens=plan.max_tokens,
            )
            rule = self._stage.cluster.rule
            self._answers[choice] = ([], fake_rule.answering(plan.prompt_ids, key, rule=rule))
        known, rest = self._answers[choice]
        known.extend(itertools.islice(rest, max(0, num_tokens - len(known))))
        return known[:num_tokens]

    def _violated(self, what: str) -> None:
        self._stage.violate(f"{self._plan.name}: {what}", self._plan.name)


class _RouterLost(Exception):
    pass


def _cut_at_stop(tokens: Sequence[int], stop: Sequence[str]) -> tuple[list[int], str]:
    """The ids up to the one that completes the first stop string, and the text before it; an id is one character."""
    text = _text(tokens)
    found = min(((text.find(word) + len(word), word) for word in stop if word in text), default=None)
    if found is None:
        return list(tokens), text
    end, word = found
    return list(tokens[:end]), text[: end - len(word)]


def _text(tokens: Sequence[int]) -> str:
    """EOS has no text."""
    return bytes(token for token in tokens if token < 256).decode("latin-1")
