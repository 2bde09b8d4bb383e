"""All attempts of one choice: wait for a pair, run on it, and judge how it ended, until the choice has."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from pdserve.clock import Clock
from pdserve.errors import KvCorrupt, LinkLost
from pdserve.ids import AttemptName, Random, draw_id64
from pdserve.messages import StartDecode
from pdserve.request import GenerateRequest
from pdserve.service.config import Config
from pdserve.stuck import STUCK_S
from router.admission import Admission
from router.attempt import Attempt, Outcome
from router.attempt_need import Need
from router.choice import Choice
from router.explain import Explained, Explanations
from router.fleet import Fleet
from router.identity import ModelIdentity
from router.learning import Learner
from router.member import Member
from router.metrics import RouterMetrics
from router.model_text import ModelText
from router.placement import Placement
from router.retry_budget import RetryBudget
from router.structures import Structures
from router.ticket import Ticket

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What all conductors of a router share."""

    config: Config
    clock: Clock
    random: Random
    fleet: Fleet
    admission: Admission
    text: ModelText
    structures: Structures
    metrics: RouterMetrics
    learner: Learner
    explanations: Explanations


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The request that a choice belongs to, and the model it was checked against.

    left_s  seconds that its client still gives
    """

    request: GenerateRequest
    identity: ModelIdentity
    request_id: str
    traceparent: str
    received_s: float
    left_s: Callable[[], float]


class ChoiceRun:
    """Event-loop thread only.

    prefer     (prefill id or "", decode id) that the first choice was placed on, if this one should follow it
    on_placed  called when a pair was found, before the attempt begins
    """

    def __init__(
        self,
        parts: Parts,
        asked: Asked,
        choice: Choice,
        *,
        begun: bool,
        prefer: Callable[[], tuple[str, str] | None],
        on_placed: Callable[[], None],
    ) -> None:
        self.choice = choice
        self.tries = RetryBudget(max_attempts=parts.config.router.max_attempts, begun=begun)
        self.attempt: Attempt | None = None  # the one that runs
        self.pair: tuple[str, str] | None = None  # of the last attempt
        self.explained: Explained | None = None  # why it went there
        self.why_waiting: list[str] = []  # what kept the last attempt from being placed
        self._parts = parts
        self._asked = asked
        self._prefer = prefer
        self._on_placed = on_placed
        self._waiting: Ticket | None = None  # the attempt that has no pair yet
        self._stuck_logged: tuple[Attempt | Ticket, str] | None = None

    async def run(self) -> None:
        """Until the choice has ended. Raises what it ends with for good."""
        while self.choice.reason is None:
            await self._one_attempt()

    def log_if_stuck(self, now_s: float) -> None:
        """Say so once if it has been in one state for long, and whom it waits for."""
        stuck: tuple[Attempt | Ticket, str]
        if (attempt := self.attempt) is not None:
            stuck, since_s = (attempt, attempt.phase.value), attempt.since_s
            prefill, decode, why = attempt.prefill, attempt.decode.id, ""
        elif (ticket := self._waiting) is not None:
            stuck, since_s = (ticket, "in the queue"), ticket.submitted_s
            prefill, decode, why = None, "", "; ".join(str(verdict) for verdict in ticket.why_waiting[:4])
        else:
            return
        if stuck == self._stuck_logged or now_s - since_s <= STUCK_S:
            return
        self._stuck_logged = stuck
        log.warning(
            "request.stuck",
            **self._name.logged,
            state=stuck[1],
            prefill="" if prefill is None else prefill.id,
            decode=decode,
            why=why,
            age_s=round(now_s - since_s, 3),
        )

    async def _one_attempt(self) -> None:
        """Wait for a pair, run on it. Returns when there may be another attempt or the choice has ended."""
        admission = self._parts.admission
        ticket = self._waiting = self._ticket()
        attempt: Attempt | None = None
        admission.submit(ticket)
        try:
            attempt = await ticket.attempt
            outcome = await attempt.outcome
        finally:
            self._waiting = None
            admission.withdraw(ticket)
            self.why_waiting = [str(verdict) for verdict in ticket.why_waiting]
            if attempt is None:
                attempt = _placed_meanwhile(ticket)
            if attempt is not None:
                attempt.close()
                self.attempt = None
                self._learn(attempt)
                self._parts.fleet.attempt_ended()
        self._judge(attempt, outcome)

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
        # Draining in a Failed says nothing about who drains: D passes its prefill worker's on. Load reports do.
        if isinstance(error, LinkLost) and attempt.prefill is not None:
            self._parts.fleet.mark_link_lost(attempt.prefill, attempt.decode, error.generation)
        if isinstance(error, KvCorrupt) and attempt.prefill is not None:
            self._parts.metrics.corrupt.labels(prefill_worker=attempt.prefill.id).inc()

    def _judge(self, attempt: Attempt, outcome: Outcome) -> None:
        """Whether there may be another attempt; raises if not."""
        error = outcome.error
        metrics = self._parts.metrics
        metrics.attempts.labels(reason="ok" if error is None else type(error).__name__).inc()
        if error is None:
            return
        choice, tries = self.choice, self.tries
        log.info(
            "attempt.failed",
            handle=attempt.handle,
            **attempt.name.logged,
            prefill="" if attempt.prefill is None else attempt.prefill.id,
            decode=attempt.decode.id,
            num_tokens=choice.num_generated,
            error=type(error).__name__,
            reason=str(error),
        )
        tries.judge(attempt, outcome)
        if attempt.prefill is not None and attempt.prefilled_tokens:
            tries.kept_on = (attempt.prefill.ref, attempt.prefilled_tokens)

    def _ticket(self) -> Ticket:
        choice, tries, request = self.choice, self.tries, self._asked.request
        need = Need(
            identity=self._asked.identity,
            token_ids=tuple(choice.ids),
            max_total_tokens=choice.num_prompt_tokens + choice.key.max_tokens,
            cache_salt=request.cache_salt,
            avoid=tries.avoid,
            prefer=self._prefer(),
            kept_on=tries.kept_on,
            takes_hits=not choice.asks_for_scores,
        )
        ticket = Ticket(
            request_id=self._asked.request_id,
            choice=choice.index,
            need=need,
            queued_s=self._asked.received_s,
            submitted_s=self._parts.clock.now_s(),
            priority=request.priority,
            user=request.user,
            replay=tries.begun,
            left_s=self._asked.left_s,
            start=lambda placement: self._start(ticket, placement),
            attempt=asyncio.get_running_loop().create_future(),
        )
        return ticket

    def _start(self, ticket: Ticket, placement: Placement) -> Attempt:
        """Called by admission in the moment in which the pair is chosen."""
        self._on_placed()
        parts, choice = self._parts, self.choice
        attempt = Attempt(
            self._start_decode(ticket.need, placement.prefill),
            placement.prefill,
            placement.decode,
            choice,
            timeouts=parts.config.timeouts,
            clock=parts.clock,
            deadline_left_s=self._asked.left_s,
            on_settled=lambda: self._settled(attempt, placement, ticket),
        )
        self.attempt = attempt
        choice.prefill_worker = "" if placement.prefill is None else placement.prefill.id
        choice.decode_worker = placement.decode.id
        self.pair = (choice.prefill_worker, choice.decode_worker)
        self._explain(placement)
        log.debug(
            "attempt.begun",
            handle=attempt.handle,
            **attempt.name.logged,
            prefill=choice.prefill_worker,
            decode=choice.decode_worker,
        )
        attempt.start(
            num_blocks=ticket.need.num_tokens // placement.decode.hello.block_size + 1,
            num_uncached_tokens=placement.expected.num_uncached,
        )
        return attempt

    def _settled(self, attempt: Attempt, placement: Placement, ticket: Ticket) -> None:
        """It runs on the decode worker, or has ended before that."""
        self._parts.learner.settled(attempt, placement, ticket.need)
        self._parts.admission.settled(ticket)

    def _start_decode(self, need: Need, prefill: Member | None) -> StartDecode:
        now_s = self._parts.clock.now_s()
        tries = self.tries
        if tries.first_start_s is None:
            tries.first_start_s = now_s
        return StartDecode(
            handle=draw_id64(self._parts.random),
            token_ids=tuple(need.token_ids),
            num_prompt_tokens=self.choice.num_prompt_tokens,
            key=self.choice.attempt_key,
            deadline_left_s=self._asked.left_s(),
            num_strikes=tries.num_strikes,
            source=None if prefill is None else prefill.ref,
            priority=self._asked.request.priority,
            age_s=now_s - tries.first_start_s,
            cache_salt=self._asked.request.cache_salt,
            name=self._name,
        )

    @property
    def _name(self) -> AttemptName:
        """Of the attempt that runs, or waits, or comes next."""
        asked = self._asked
        return AttemptName(asked.request_id, self.choice.index, self.tries.num_attempts, asked.traceparent)

    def _explain(self, placement: Placement) -> None:
        self.explained = self._parts.explanations.add(
            self._asked.request_id, self.choice.index, self.tries.num_attempts, placement.explain
        )


def _placed_meanwhile(ticket: Ticket) -> Attempt | None:
    """The attempt of a ticket whose owner was cancelled in the very turn in which the pair was found."""
    future = ticket.attempt
    if not future.done() or future.cancelled() or future.exception() is not None:
        return None
    return future.result()
