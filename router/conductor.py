"""One request from acceptance to its single end: prepare, then attempts for each choice until all have ended."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from pdserve.clock import Clock
from pdserve.errors import (
    DeadlineExceeded,
    Draining,
    InvariantViolated,
    KvCorrupt,
    PdserveError,
    RequestCancelled,
    primary,
)
from pdserve.ids import Random, draw_id64
from pdserve.request import GenerateRequest, Started, Tokens
from pdserve.sampling import SampleKey
from pdserve.service.config import Config
from router.admission import Admission, Ticket
from router.attempt import Attempt, Order, Outcome
from router.choice import Choice
from router.fleet import Fleet
from router.metrics import RouterMetrics
from router.output import Output
from router.placement import Need, Placement, Verdict
from router.progress_timer import CallLater
from router.summary import log_finished
from router.text import ModelText
from router.tries import Tries
from router.validation import check_ids, check_model, resolve_max_tokens

log = structlog.get_logger()

STUCK_S = 5.0  # an attempt in one state for so long is logged, once


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What all conductors of a router share."""

    config: Config
    clock: Clock
    random: Random
    call_later: CallLater
    fleet: Fleet
    admission: Admission
    text: ModelText
    metrics: RouterMetrics
    explained: deque[tuple[str, tuple[Verdict, ...]]]  # request id, verdicts of its last placement


class Conductor:
    """Event-loop thread only. `run` is a task of its own; `output` is what the client reads.

    deadline_left_s  of the client, from now
    """

    def __init__(
        self, parts: Parts, request: GenerateRequest, request_id: str, deadline_left_s: float
    ) -> None:
        self.request = request
        self.request_id = request_id
        self.received_s = parts.clock.now_s()
        self.seed = 0
        self.prompt_ids: tuple[int, ...] = ()
        self.choices: list[Choice] = []
        self.tries: dict[int, Tries] = {}  # by choice
        self.attempts: dict[int, Attempt] = {}  # by choice, the one that runs
        self.output = Output(
            parts.clock, parts.call_later, parts.config.timeouts.client_stall_s, self._client_stalled
        )
        self._parts = parts
        self._deadline_s = self.received_s + deadline_left_s
        self._task: asyncio.Task[None] | None = None
        self._cancelled_by: PdserveError | None = None
        self._first_started = asyncio.Event()
        self._pair: tuple[str, str] | None = None  # of choice 0
        self.on_stalled: Callable[[], None] = lambda: None
        self._num_closed = 0  # choices whose closing event has been put out
        self._ran = False
        self._begun = False
        self._stuck_logged: Attempt | None = None

    # --- from outside

    def bind(self, task: asyncio.Task[None]) -> None:
        """The task that `run` runs in."""
        self._task = task

    def cancel(self, error: PdserveError) -> None:
        """End the request with this error, now. Idempotent; the first error stays; no effect after a good end."""
        if self.output.complete or self._task is None or self._task.done():
            return
        if self._cancelled_by is None:
            self._cancelled_by = error
            self._task.cancel()

    def draining(self) -> Draining:
        """The error with which a draining router ends the request: enough to go on at another router."""
        shown = ",".join(str(choice.num_shown) for choice in self.choices)
        return Draining(
            "this router is draining: resume at another one with this seed and the token ids received",
            request_id=self.request_id,
            seed=self.seed,
            num_tokens=shown,
        )

    @property
    def waits(self) -> bool:
        """Whether nothing has been begun for it yet: it is being prepared, or in the queue for the first time."""
        return not self.attempts and not self._begun

    def finish_unrun(self) -> None:
        """The task has ended; if it was cancelled before its first turn, `run` never saw it."""
        if not self._ran:
            error = self._cancelled_by or RequestCancelled("the router stops")
            self.output.fail(error)
            log_finished(self, error, self._parts.clock.now_s(), self._parts.metrics)

    def on_taken(self, tokens: Tokens, now_s: float) -> None:
        """A token event leaves for the client."""
        self.choices[tokens.choice].times.on_first_written(now_s)

    def log_if_stuck(self, now_s: float) -> None:
        """Say so once if an attempt has been in one state for long."""
        for attempt in self.attempts.values():
            age_s = now_s - attempt.since_s
            if age_s > STUCK_S and attempt is not self._stuck_logged:
                self._stuck_logged = attempt
                log.warning(
                    "request.stuck",
                    request_id=self.request_id,
                    state=attempt.phase.value,
                    prefill="" if attempt.prefill is None else attempt.prefill.id,
                    decode=attempt.decode.id,
                    age_s=round(age_s, 3),
                )

    # --- the whole

    async def run(self) -> None:
        """Until the request has ended and the client has taken everything; raises only CancelledError."""
        self._ran = True
        self._parts.metrics.requests_running.inc()
        error: PdserveError | None = InvariantViolated("the request ended without an answer")
        try:
            await self._conduct()
            error = None
        except asyncio.CancelledError:
            error = self._cancelled_by
            if error is None:
                error = RequestCancelled("the router stops")
                raise
        except PdserveError as raised:
            error = raised
        except BaseExceptionGroup as group:
            found = primary(group)
            error = found if isinstance(found, PdserveError) else self._bug(found)
        except Exception as bug:  # the outermost frame of a request: the others go on
            error = self._bug(bug)
        finally:
            if error is not None:
                self.output.fail(error)
            self._parts.metrics.requests_running.dec()
            log_finished(self, error, self._parts.clock.now_s(), self._parts.metrics)

    def _bug(self, bug: BaseException) -> InvariantViolated:
        log.error("request.crashed", request_id=self.request_id, exc_info=bug)
        return InvariantViolated("internal error of the router", request_id=self.request_id)

    def _client_stalled(self) -> None:
        after_s = self._parts.config.timeouts.client_stall_s
        self.cancel(RequestCancelled("the client doesn't read its stream", after_s=after_s))
        self.on_stalled()

    async def _conduct(self) -> None:
        deadline = asyncio.timeout(self._left_s())
        try:
            async with deadline:
                with self._parts.admission.place() as give_back:
                    await self._prepare()
                    async with asyncio.TaskGroup() as group:
                        for choice in self.choices:
                            group.create_task(self._conduct_choice(choice, give_back))
                await self.output.all_taken()
        except TimeoutError:
            if deadline.expired():
                raise DeadlineExceeded(
                    "the deadline has passed", after_s=round(self._deadline_s - self.received_s, 3)
                ) from None
            raise

    def _left_s(self) -> float:
        return max(0.0, self._deadline_s - self._parts.clock.now_s())

    # --- before any reservation

    async def _prepare(self) -> None:
        """Tokenize, check against the model, make the choices."""
        request, parts = self.request, self._parts
        tokenizer = await parts.text.get(parts.config.timeouts.worker_wait_s)
        identity = await parts.fleet.get_identity(parts.config.timeouts.worker_wait_s)
        check_model(request.model, identity.model)
        if isinstance(request.input, tuple):
            self.prompt_ids = request.input
        else:
            self.prompt_ids = await parts.text.encode(tokenizer, request.input)
        check_ids(request, self.prompt_ids, identity.vocab_size)
        max_tokens = resolve_max_tokens(request, len(self.prompt_ids), parts.fleet.window_tokens)
        if request.resume is not None:
            self.seed = request.resume.seed
        else:
            self.seed = request.seed if request.seed is not None else draw_id64(parts.random)
        parts.metrics.prompt_tokens.inc(len(self.prompt_ids))
        for index in range(request.n):
            key = SampleKey(
                params=request.sampling,
                seed=self.seed,
                choice=index,
                eos_token_ids=identity.eos_token_ids,
                max_tokens=max_tokens,
            )
            choice = Choice(
                self.prompt_ids,
                key,
                tokenizer.stream(),
                self.output,
                self.received_s,
                parts.clock,
                parts.metrics,
                on_begin=self._begin_stream,
                on_started=self._first_started.set,
            )
            self.choices.append(choice)
            self.tries[index] = Tries(max_attempts=parts.config.router.max_attempts)
            if request.resume is not None:
                choice.restore(request.resume.choices[index])
                self.tries[index].begun = choice.num_generated > 0

    def _begin_stream(self, num_cached_tokens: int) -> None:
        """The first event of the stream, before the first token of any choice."""
        if self._begun:
            return
        self._begun = True
        self._parts.metrics.cached_tokens.inc(num_cached_tokens)
        identity = self._parts.fleet.identity
        self.output.put(
            Started(
                request_id=self.request_id,
                seed=self.seed,
                num_prompt_tokens=len(self.prompt_ids),
                num_cached_tokens=num_cached_tokens,
                prompt_token_ids=self.prompt_ids,
                model=identity.model if identity is not None else self.request.model,
            )
        )

    # --- one choice

    async def _conduct_choice(self, choice: Choice, give_back: Callable[[], None]) -> None:
        tries = self.tries[choice.index]
        if choice.index > 0:
            await self._first_started.wait()  # so that the prompt is in the prefix cache by then
        while choice.reason is None:
            await self._one_attempt(choice, tries, give_back)
        if choice.index == 0:
            self._first_started.set()
        self._begin_stream(choice.num_cached_tokens or 0)
        self.output.put_made(lambda now_s: choice.finished(now_s, tries.num_attempts))
        self._num_closed += 1
        if self._num_closed == len(self.choices):
            self.output.end()

    async def _one_attempt(self, choice: Choice, tries: Tries, give_back: Callable[[], None]) -> None:
        """Wait for a pair, run on it. Returns when there may be another attempt or the choice has ended."""
        parts = self._parts
        ticket = self._ticket(choice, tries, give_back)
        attempt: Attempt | None = None
        parts.admission.submit(ticket)
        try:
            attempt = await ticket.attempt
            outcome = await attempt.outcome
        finally:
            parts.admission.withdraw(ticket)
            if attempt is None and ticket.attempt.done() and not ticket.attempt.cancelled():
                # Cancelled in the very turn in which the pair was found.
                attempt = ticket.attempt.result() if ticket.attempt.exception() is None else None
            if attempt is not None:
                attempt.close()
                self.attempts.pop(choice.index, None)
                self._learn(attempt)
                parts.fleet.attempt_ended()
        self._judge(choice, tries, attempt, outcome)

    def _learn(self, attempt: Attempt) -> None:
        """What the end of an attempt says about the workers."""
        if not attempt.outcome.done() or attempt.outcome.cancelled():
            return  # ended from this side
        outcome = attempt.outcome.result()
        error = outcome.error
        if error is None:
            return
        if outcome.refused_by is not None:
            self._parts.fleet.mark_refusing(outcome.refused_by, error)
        elif isinstance(error, Draining):
            self._parts.fleet.mark_draining(attempt.decode)
        if isinstance(error, KvCorrupt) and attempt.prefill is not None:
            self._parts.metrics.corrupt.labels(prefill_worker=attempt.prefill.id).inc()

    def _judge(self, choice: Choice, tries: Tries, attempt: Attempt, outcome: Outcome) -> None:
        """Whether there may be another attempt; raises if not."""
        error = outcome.error
        metrics = self._parts.metrics
        metrics.attempts.labels(reason="ok" if error is None else type(error).__name__).inc()
        if error is None:
            return
        log.info(
            "attempt.failed",
            request_id=self.request_id,
            choice=choice.index,
            attempt=tries.num_attempts,
            prefill="" if attempt.prefill is None else attempt.prefill.id,
            decode=attempt.decode.id,
            num_tokens=choice.num_generated,
            error=type(error).__name__,
            reason=str(error),
        )
        tries.judge(attempt, outcome)
        if attempt.prefill is not None and attempt.prefilled_tokens:
            tries.kept_on = (attempt.prefill.ref, attempt.prefilled_tokens)

    def _ticket(self, choice: Choice, tries: Tries, give_back: Callable[[], None]) -> Ticket:
        need = Need(
            token_ids=tuple(choice.ids),
            max_total_tokens=choice.num_prompt_tokens + choice.key.max_tokens,
            cache_salt=self.request.cache_salt,
            avoid=tries.avoid,
            prefer=self._pair if choice.index > 0 else None,
            kept_on=tries.kept_on,
        )
        ticket = Ticket(
            need=need,
            queued_s=self.received_s,
            submitted_s=self._parts.clock.now_s(),
            priority=self.request.priority,
            user=self.request.user,
            replay=tries.begun,
            start=lambda placement: self._start(choice, tries, ticket, placement, give_back),
            attempt=asyncio.get_running_loop().create_future(),
        )
        return ticket

    def _start(
        self,
        choice: Choice,
        tries: Tries,
        ticket: Ticket,
        placement: Placement,
        give_back: Callable[[], None],
    ) -> Attempt:
        """Called by admission in the moment in which the pair is chosen."""
        parts = self._parts
        give_back()
        now_s = parts.clock.now_s()
        if tries.first_start_s is None:
            tries.first_start_s = now_s
        attempt = Attempt(
            draw_id64(parts.random),
            Order(
                token_ids=tuple(ticket.need.token_ids),
                num_prompt_tokens=choice.num_prompt_tokens,
                key=choice.key,
                num_strikes=tries.num_strikes,
                priority=self.request.priority,
                age_s=now_s - tries.first_start_s,
                cache_salt=self.request.cache_salt,
            ),
            placement.prefill,
            placement.decode,
            choice,
            timeouts=parts.config.timeouts,
            clock=parts.clock,
            call_later=parts.call_later,
            deadline_left_s=self._left_s,
            on_settled=lambda: parts.admission.settled(ticket),
        )
        self.attempts[choice.index] = attempt
        choice.prefill_worker = "" if placement.prefill is None else placement.prefill.id
        choice.decode_worker = placement.decode.id
        if choice.index == 0:
            self._pair = (choice.prefill_worker, choice.decode_worker)
        self._explain(choice, placement)
        attempt.start(
            num_blocks=len(ticket.need.token_ids) // placement.decode.hello.block_size + 1,
            num_uncached_tokens=placement.num_uncached_tokens,
        )
        return attempt

    def _explain(self, choice: Choice, placement: Placement) -> None:
        self._parts.explained.append((self.request_id, placement.explain))
        log.debug(
            "attempt.placed",
            request_id=self.request_id,
            choice=choice.index,
            prefill=choice.prefill_worker,
            decode=choice.decode_worker,
            explain=[str(verdict) for verdict in placement.explain],
        )
