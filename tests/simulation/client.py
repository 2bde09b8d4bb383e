"""A simulated client: one request, its events checked as they come, its resumption at another router."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from pdserve.engine import fake_rule
from pdserve.errors import PdserveError, RequestCancelled
from pdserve.request import Finished, GenerateRequest, Resume, ResumeChoice, Started, Tokens
from pdserve.sampling import FinishReason, SampleKey, SamplingParams
from router.generation import Generation
from tests.simulation.cluster import SimCluster


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What one client asks for and does."""

    name: str
    at_s: float
    router_id: str
    prompt_ids: tuple[int, ...]
    max_tokens: int
    n: int = 1
    greedy: bool = False
    priority: int = 0
    user: str = ""
    stop: tuple[str, ...] = ()
    deadline_s: float | None = None
    cancel_after_s: float | None = None
    reads_slowly_s: float = 0.0  # pause between events
    poisoned: bool = False


@dataclass(slots=True)
class ClientLog:
    """What the client saw. `ends` must hold exactly one entry when all is over: "ok", or the error's class."""

    plan: Plan
    begun_s: float = 0.0
    ended_s: float = 0.0
    first_token_s: float | None = None
    seed: int | None = None
    tokens: dict[int, list[int]] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    reasons: dict[int, FinishReason] = field(default_factory=dict)
    ends: list[str] = field(default_factory=list)
    error: PdserveError | None = None
    violations: list[str] = field(default_factory=list)
    num_resumes: int = 0
    num_attempts: int = 0
    generation: Generation | None = None

    @property
    def ended(self) -> bool:
        return bool(self.ends)


class Client:
    """Runs one plan."""

    def __init__(self, cluster: SimCluster, plan: Plan) -> None:
        self.log = ClientLog(plan)
        self._cluster = cluster
        self._plan = plan
        self._has_cancelled = False

    async def run(self) -> None:
        """Until the request has ended for this client."""
        clock, log, plan = self._cluster.clock, self.log, self._plan
        log.begun_s = clock.now_s()
        canceller = None
        if plan.cancel_after_s is not None:
            canceller = asyncio.get_running_loop().call_later(plan.cancel_after_s, self._cancel)
        try:
            while True:
                try:
                    await self._stream_once()
                    log.ends.append("RequestCancelled" if self._has_cancelled else "ok")
                except _RouterLost:
                    log.num_resumes += 1
                    await asyncio.sleep(0.1)
                    continue
                except PdserveError as error:
                    log.ends.append(type(error).__name__)
                    log.error = error
                break
        finally:
            if canceller is not None:
                canceller.cancel()
            log.ended_s = clock.now_s()
        if log.ends == ["ok"]:
            self._check_complete()

    def _cancel(self) -> None:
        self._has_cancelled = True
        if self.log.generation is not None:
            self.log.generation.close()

    def _request(self) -> GenerateRequest:
        plan, log = self._plan, self.log
        resume = None
        if log.seed is not None:
            choices = tuple(
                ResumeChoice(tuple(log.tokens.get(index, ())), log.reasons.get(index)) for index in range(plan.n)
            )
            resume = Resume(seed=log.seed, choices=choices)
        sampling = SamplingParams(
            temperature=0.0 if plan.greedy else 1.0, max_tokens=plan.max_tokens, stop=plan.stop
        )
        return GenerateRequest(
            request_id=f"{plan.name}.{log.num_resumes}",
            input=plan.prompt_ids,
            sampling=sampling,
            n=plan.n,
            priority=plan.priority,
            user=plan.user,
            resume=resume,
        )

    def _router(self) -> str | None:
        """The router to ask: the planned one, or after a loss any that lives."""
        routers = self._cluster.routers
        if self._is_up(self._plan.router_id):
            return self._plan.router_id
        return next((router_id for router_id in routers if self._is_up(router_id)), None)

    def _is_up(self, router_id: str) -> bool:
        app = self._cluster.routers[router_id].app
        return app is not None and not app.admission.draining

    def _left_s(self) -> float | None:
        plan, log = self._plan, self.log
        if plan.deadline_s is None:
            return None
        return max(0.0, plan.deadline_s - (self._cluster.clock.now_s() - log.begun_s))

    async def _stream_once(self) -> None:
        """One stream to its end. Raises _RouterLost if the client should go on elsewhere."""
        router_id = self._router()
        if router_id is None:
            if self._has_cancelled:
                raise RequestCancelled("gone while no router was there")
            raise _RouterLost
        app = self._cluster.routers[router_id].app
        assert app is not None, "just asked"
        generation = app.generate(self._request(), deadline_left_s=self._left_s())
        self.log.generation = generation
        try:
            async for event in generation:
                if isinstance(event, Started):
                    self._on_started(event)
                elif isinstance(event, Tokens):
                    self._on_tokens(event)
                elif isinstance(event, Finished):
                    self._on_finished(event)
                if self._plan.reads_slowly_s:
                    await asyncio.sleep(self._plan.reads_slowly_s)
        except PdserveError as error:
            if self._lost_router(router_id, error):
                raise _RouterLost from error
            raise

    def _lost_router(self, router_id: str, error: PdserveError) -> bool:
        """Whether it was the router that went, not the request that failed."""
        went = not self._is_up(router_id)
        gone = isinstance(error, RequestCancelled) and error.message == "the router stops"
        draining = type(error).__name__ == "Draining"
        cancelled = isinstance(error, RequestCancelled) and not gone
        return (went and not cancelled) and (gone or draining)

    # --- events

    def _on_started(self, event: Started) -> None:
        if self.log.seed is not None and self.log.seed != event.seed:
            self._violated(f"the seed changed from {self.log.seed} to {event.seed}")
        self.log.seed = event.seed
        if event.num_prompt_tokens != len(self._plan.prompt_ids):
            self._violated(f"{event.num_prompt_tokens} prompt tokens, asked with {len(self._plan.prompt_ids)}")

    def _on_tokens(self, event: Tokens) -> None:
        log = self.log
        if log.first_token_s is None:
            log.first_token_s = self._cluster.clock.now_s()
        tokens = log.tokens.setdefault(event.choice, [])
        if event.first_index != len(tokens):
            self._violated(f"choice {event.choice}: index {event.first_index} where {len(tokens)} was due")
        if event.choice in log.reasons:
            self._violated(f"choice {event.choice}: tokens after its end")
        tokens.extend(event.token_ids)
        log.texts[event.choice] = log.texts.get(event.choice, "") + event.text
        want = self._expected(event.choice)[: len(tokens)]
        if want != tokens:
            self._violated(f"choice {event.choice}: wrong text {_text(tokens)!r}, want {_text(want)!r}")

    def _on_finished(self, event: Finished) -> None:
        log = self.log
        if event.choice in log.reasons:
            if log.num_resumes == 0:
                self._violated(f"choice {event.choice} ended twice")
            return
        log.reasons[event.choice] = event.reason
        log.num_attempts += event.num_attempts

    def _check_complete(self) -> None:
        for choice in range(self._plan.n):
            got = self.log.tokens.get(choice, [])
            want, text = _cut_at_stop(self._expected(choice), self._plan.stop)
            if got != want:
                self._violated(f"choice {choice} is not whole: {len(got)} of {len(want)} tokens")
            if self.log.texts.get(choice, "") != text:
                self._violated(f"choice {choice} has another text than its tokens: {self.log.texts.get(choice)!r}")
            if choice not in self.log.reasons:
                self._violated(f"choice {choice} has no end")

    def _expected(self, choice: int) -> list[int]:
        plan, seed = self._plan, self.log.seed
        if seed is None:
            self._violated("tokens before `started`")
            return []
        key = SampleKey(
            params=SamplingParams(temperature=0.0 if plan.greedy else 1.0),
            seed=seed,
            choice=choice,
            eos_token_ids=(fake_rule.EOS_ID,),
            max_tokens=plan.max_tokens,
        )
        return fake_rule.expected_choice(plan.prompt_ids, key)

    def _violated(self, what: str) -> None:
        self.log.violations.append(f"{self._plan.name}: {what}")


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
    return bytes(token for token in tokens if token < 256).decode("latin-1")
