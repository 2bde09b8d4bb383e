"""All attempts of one choice: wait for a pair, run on it, and judge how it ended, until the choice has."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from pdserve.clock import Clock
from pdserve.errors import KvCorrupt, LinkLost, RowFailed, StepFailed
from pdserve.ids import AttemptName, Random, WorkerRef, draw_id64
from pdserve.messages import StartDecode
from pdserve.service.config import Config
from pdserve.stuck import MayStick, is_newly_stuck
from pdserve.tracing import Tracer, named_below
from router.admission import Admission
from router.asked import Asked
from router.attempt import Attempt, Outcome
from router.attempt_need import Need
from router.choice import Choice
from router.explain import Explained
from router.fleet import Fleet
from router.identity import ModelIdentity
from router.learning import Learner
from router.member import Member
from router.metrics import RouterMetrics
from router.model_text import ModelText
from router.placement import Placement
from router.structures import Structures
from router.ticket import Ticket
from router.turns import Turns

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What all conductors of a router share. explanations: of the last placements, oldest first."""

    config: Config
    clock: Clock
    random: Random
    fleet: Fleet
    admission: Admission
    turns: Turns
    text: ModelText
    structures: Structures
    metrics: RouterMetrics
    learner: Learner
    tracer: Tracer
    explanations: deque[Explained]


MAX_TRACED = 32  # attempts of a choice; of more, refused ones mostly, the latest
MAX_STRIKES = 2  # a request whose steps failed so often is never run again


class ChoiceRun:
    """Event-loop thread only.

    follows       the first choice: this one goes to its pair if it can
    on_placed     called when a pair was found, before the attempt begins
    num_attempts  as users count them: the last one, and those before it that ended by a fault; refusals, revocations,
                  drains and hand-backs don't count
    """

    def __init__(
        self,
        parts: Parts,
        asked: Asked,
        identity: ModelIdentity,
        choice: Choice,
        *,
        follows: Choice | None,
        on_placed: Callable[[], None],
    ) -> None:
        self.choice = choice
        self.attempt: Attempt | None = None  # the one that runs
        self.explained: Explained | None = None  # why it went there
        self.why_waiting: list[str] = []  # what kept the last attempt from being placed
        self.num_attempts = 1
        self.num_strikes = 0
        self.traced: deque[Attempt] = deque(maxlen=MAX_TRACED)
        self.is_placed = False  # the latest attempt has, or had, a pair
        self._parts = parts
        self._asked = asked
        self._identity = identity
        self._follows = follows
        self._on_placed = on_placed
        self._waiting: Ticket | None = None  # the attempt that has no pair yet
        self._begun = choice.num_generated > 0  # by some worker: whatever follows is a replay
        self._first_start_s: float | None = None
        self._faults: dict[tuple[str, str], int] = {}
        self._kept_on: tuple[WorkerRef, int] | None = None

    async def run(self) -> None:
        """Until the choice has ended. Raises what it ends with for good."""
        while self.choice.reason is None:
            await self._one_attempt()

    def log_if_stuck(self, now_s: float) -> None:
        """Say so once if it has been in one state for long, and whom it waits for."""
        if (attempt := self.attempt) is not None:
            it: MayStick = attempt.phase_clock
            state, (prefill, decode), why = attempt.phase.value, attempt.pair, ""
        elif (ticket := self._waiting) is not None:
            it, state, prefill, decode = ticket, "in the queue", "", ""
            why = "; ".join(str(verdict) for verdict in ticket.why_waiting[:4])
        else:
            return
        if is_newly_stuck(it, now_s):
            log.warning(
                "request.stuck",
                **self._name.logged,
                state=state,
                prefill=prefill,
                decode=decode,
                why=why,
                age_s=round(now_s - it.progress_s, 3),
            )

    async def _one_attempt(self) -> None:
        """Wait for a pair, run on it. Returns when there may be another attempt or the choice has ended."""
        admission = self._parts.admission
        ticket = self._waiting = self._ticket()
        try:
            admission.submit(ticket)
            outcome = await ticket.outcome
        finally:
            self._waiting = None
            admission.withdraw(ticket)
            self.why_waiting = [str(verdict) for verdict in ticket.why_waiting]
            attempt = self.attempt
            if attempt is not None:
                attempt.close()
                self.attempt = None
                self._tell_fleet(attempt)
        assert attempt is not None, "an outcome is that of an attempt"
        self._judge(attempt, outcome)

    def _tell_fleet(self, attempt: Attempt) -> None:
        """What the end of an attempt says about the workers; nothing if it was ended from this side."""
        fleet, prefill = self._parts.fleet, attempt.prefill
        if attempt.outcome.done() and not attempt.outcome.cancelled():
            outcome = attempt.outcome.result()
            error = outcome.error
            if error is not None and error.replayable and outcome.refused_by is not None:
                fleet.mark_refusing(outcome.refused_by, error)
            # Draining in a Failed says nothing about who drains: D passes its prefill worker's on. Load reports do.
            if isinstance(error, LinkLost) and prefill is not None:
                fleet.mark_link_lost(prefill, attempt.decode, error.generation)
            if isinstance(error, KvCorrupt) and prefill is not None:
                self._parts.metrics.corrupt.labels(prefill_worker=prefill.id).inc()
        fleet.attempt_ended()

    def _judge(self, attempt: Attempt, outcome: Outcome) -> None:
        """Whether there may be another attempt; raises the error of this one, or what it amounts to, if not."""
        error, (prefill, decode) = outcome.error, attempt.pair
        reason = "ok" if error is None else type(error).__name__
        self._parts.metrics.attempts.labels(reason=reason).inc()
        if error is None:
            return
        log.info(
            "attempt.failed",
            handle=attempt.handle,
            **attempt.name.logged,
            prefill=prefill,
            decode=decode,
            num_tokens=self.choice.num_generated,
            error=reason,
            reason=str(error),
        )
        if outcome.refused_by is None:
            self._begun = True
        if isinstance(error, StepFailed):
            self.num_strikes += 1
            if self.num_strikes >= MAX_STRIKES:
                raise RowFailed(
                    "engine steps with this request failed", strikes=self.num_strikes, last=str(error)
                )
        if not error.replayable:
            raise error
        if error.counts_as_attempt and outcome.refused_by is None:
            self._faults[attempt.pair] = self._faults.get(attempt.pair, 0) + 1
            if self.num_attempts >= self._parts.config.router.max_attempts:
                error.fields["attempts"] = self.num_attempts
                raise error
            self.num_attempts += 1
        if attempt.prefill is not None and attempt.prefilled_tokens:
            self._kept_on = (attempt.prefill.ref, attempt.prefilled_tokens)

    def _ticket(self) -> Ticket:
        choice, asked = self.choice, self._asked
        self.is_placed = False
        ticket = Ticket(
            name=self._name,
            need=Need(
                identity=self._identity,
                token_ids=tuple(choice.ids),
                max_total_tokens=choice.num_prompt_tokens + choice.key.max_tokens,
                cache_salt=asked.cache_salt,
                avoid=self._faults,
                only=asked.only,
                prefer=None if self._follows is None else self._follows.pair,
                kept_on=self._kept_on,
                takes_hits=not choice.asks_for_scores,
            ),
            queued_s=asked.received_s,
            submitted_s=self._parts.clock.now_s(),
            priority=asked.request.priority,
            user=asked.user,
            replay=self._begun,
            left_s=asked.left_s,
            start=lambda placement: self._start(ticket, placement),
            outcome=asyncio.get_running_loop().create_future(),
        )
        return ticket

    def _start(self, ticket: Ticket, placement: Placement) -> None:
        """Called by admission in the moment in which the pair is chosen: it is booked before anybody else is placed."""
        self._on_placed()
        self.is_placed = True
        parts, choice, need = self._parts, self.choice, ticket.need
        place = None if self._asked.place is None else self._asked.place.below()
        attempt = self.attempt = Attempt(
            self._start_decode(need, placement.prefill, named_below(self._name, place)),
            placement,
            choice,
            ticket.outcome,
            timeouts=parts.config.timeouts,
            clock=parts.clock,
            deadline_left_s=self._asked.left_s,
            on_settled=lambda: self._settled(attempt, placement, ticket),
            place=place,
        )
        if place is not None:
            self.traced.append(attempt)
        choice.pair = prefill, decode = attempt.pair
        times = choice.times, attempt.times
        self.explained = Explained(
            self._asked.user, attempt.name, parts.clock.now_s(), placement.explain, times
        )
        parts.explanations.append(self.explained)
        log.debug(
            "attempt.begun", handle=attempt.handle, **attempt.name.logged, prefill=prefill, decode=decode
        )
        attempt.start()

    def _settled(self, attempt: Attempt, placement: Placement, ticket: Ticket) -> None:
        """It runs on the decode worker, or has ended before that."""
        self._parts.learner.settled(attempt.times, placement, ticket.need)
        self._parts.admission.settled(ticket)

    def _start_decode(self, need: Need, prefill: Member | None, name: AttemptName) -> StartDecode:
        choice, now_s = self.choice, self._parts.clock.now_s()
        if self._first_start_s is None:
            self._first_start_s = now_s
        return StartDecode(
            handle=draw_id64(self._parts.random),
            token_ids=tuple(need.token_ids),
            num_prompt_tokens=choice.num_prompt_tokens,
            key=choice.attempt_key,
            deadline_left_s=self._asked.left_s(),
            num_strikes=self.num_strikes,
            source=None if prefill is None else prefill.ref,
            priority=self._asked.request.priority,
            age_s=now_s - self._first_start_s,
            cache_salt=need.cache_salt,
            name=name,
        )

    @property
    def _name(self) -> AttemptName:
        """Of the attempt that runs, or waits, or comes next."""
        return self._asked.name(self.choice.index, self.num_attempts)
