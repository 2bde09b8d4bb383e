"""One try of one choice on one pair, as a state machine: protocol.md, "Hand-off", "Verdict" and "Time".

    GRANTING ──► WAITING ──► QUEUED ──► PREFILLING ──► HANDOFF ──► RUNNING ⇄ PREEMPTED
        D asked    D's list    P's queue  P computes     D's verdict  D decodes
                                                         awaited
Any state can end it: with SequenceFinished, with an error, or by `close` from outside (client gone, text ended).
From then on its handle is closed: whatever still comes under it is dropped and counted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from pdserve.clock import Clock
from pdserve.errors import InvariantViolated, PdserveError, StepFailed, WorkerLost, from_failure
from pdserve.messages import (
    AttemptMessage,
    DecodeStarted,
    Failed,
    FirstToken,
    Granted,
    Phase,
    Progress,
    PromptLogprobs,
    Refused,
    SequenceFinished,
    StartDecode,
    StartPrefill,
    StepTokens,
    Waiting,
)
from pdserve.sampling import FinishReason
from pdserve.service.config import TimeoutsConfig
from pdserve.tracing import Trace, named_below
from router.choice import Choice
from router.member import Member
from router.phase_clock import AttemptPhase, PhaseClock
from router.placement import Placement
from router.timings import AttemptTimes
from router.token_flow import TokenFlow


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an attempt ended: error None = the choice has ended; `refused_by`: nothing was begun."""

    error: PdserveError | None = None
    refused_by: Member | None = None


class Attempt:
    """Event-loop thread only.

    start            what the decode worker is asked for
    prefill          None = the decode worker prefills
    choice           that the tokens belong to
    outcome          resolved when the attempt has ended by itself
    deadline_left_s  seconds that the client still gives, when StartPrefill is written
    on_settled       called once: the sequence runs, or the attempt has ended
    place            its span, if it is traced; below it that of its prefill, which the prefill worker's are below
    """

    def __init__(
        self,
        start: StartDecode,
        placement: Placement,
        choice: Choice,
        outcome: asyncio.Future[Outcome],
        *,
        timeouts: TimeoutsConfig,
        clock: Clock,
        deadline_left_s: Callable[[], float],
        on_settled: Callable[[], None],
        place: Trace | None = None,
    ) -> None:
        self.handle = start.handle
        self.name = start.name
        self.prefill = prefill = placement.prefill
        self.decode = placement.decode
        self.place = place
        self.prefill_place = None if place is None or prefill is None else place.below()
        self.times = AttemptTimes(credit_held_s=clock.now_s(), local=prefill is None)
        self.outcome = outcome
        self.prefilled_tokens = 0  # P's progress
        self.started = False  # D's verdict was DecodeStarted
        self._start = start
        self._num_uncached = placement.expected.num_uncached
        self._choice = choice
        self._clock = clock
        self._deadline_left_s = deadline_left_s
        self._on_settled: Callable[[], None] | None = on_settled
        self.phase_clock = PhaseClock(timeouts, clock, prefill, self.decode, self._late)
        self._tokens = TokenFlow(start, choice, self.times)
        self._prefill_written = False
        self._prefill_over = prefill is None  # P has ended its part itself, or its session is gone
        self._decode_over = False
        self._prefill_error: PdserveError | None = None
        self._pull_progress = 0
        self._held_finish: SequenceFinished | None = None

    @property
    def phase(self) -> AttemptPhase:
        """Where it is, as far as the router knows."""
        return self.phase_clock.phase

    @property
    def pair(self) -> tuple[str, str]:
        """Ids of its prefill worker, "" for none, and its decode worker."""
        return "" if self.prefill is None else self.prefill.id, self.decode.id

    # --- begin

    def start(self) -> None:
        """Book it on both workers and ask the decode worker."""
        now_s = self._clock.now_s()
        num_tokens, num_uncached = len(self._start.token_ids), self._num_uncached
        ends_there = self._start.key.next_is_last(num_tokens, self._start.num_prompt_tokens)
        needs_none = self.prefill is not None and ends_there
        num_blocks = 0 if needs_none else num_tokens // self.decode.hello.block_size + 1
        self.decode.open_leg(self.handle, self)
        self.decode.asking[self.handle] = None
        self.decode.accounting.assign(self.handle, 0 if self.prefill else num_uncached, num_blocks, now_s)
        if self.prefill is not None:
            self.prefill.open_leg(self.handle, self)
            self.prefill.credit.hold(self.handle, num_tokens)
            self.prefill.accounting.assign(self.handle, num_uncached, 0, now_s)
        self.decode.send(self._start)
        self.times.decode_written_s = now_s

    # --- messages

    def on_message(self, member: Member, message: AttemptMessage | StepTokens) -> None:
        """One message of one of the two workers."""
        try:
            if member is self.decode:
                self._from_decode(message)
            else:
                self._from_prefill(member, message)
        except InvariantViolated as violated:
            self._fail(violated)
        if self._choice.reason is FinishReason.STOP_TEXT:  # of which the workers don't know
            self._end(Outcome())

    def _from_decode(self, message: AttemptMessage | StepTokens) -> None:
        match message:
            case StepTokens():
                if self._tokens.take(message):
                    if self.phase is AttemptPhase.PREEMPTED:
                        self.phase_clock.enter(AttemptPhase.RUNNING)
                    self.phase_clock.progress(AttemptPhase.RUNNING)
            case Progress():
                self._on_decode_progress(message)
            case Granted():
                self._on_granted(message)
            case Waiting():
                if self.phase is AttemptPhase.GRANTING:
                    self.phase_clock.enter(AttemptPhase.WAITING)
            case Refused():
                self._decode_over = True
                self._refused(self.decode, message)
            case DecodeStarted():
                self._on_started(message)
            case SequenceFinished():
                self._on_finished(message)
            case Failed():
                self._decode_over = True
                # P's own error came first and says more than D's "withdrawn" or "link ended".
                self._fail(self._prefill_error or from_failure(message.failure))
            case PromptLogprobs() if self.prefill is None:
                self._on_prompt_logprobs(message)
            case FirstToken() | PromptLogprobs():
                self._unexpected(message)

    def _from_prefill(self, member: Member, message: AttemptMessage | StepTokens) -> None:
        match message:
            case Progress():
                self._on_prefill_progress(message)
            case FirstToken():
                self._on_first_token(message)
            case Refused():
                self._prefill_over = True
                self._refused(member, message)
            case Failed():
                self._prefill_over = True
                self._lose_prefill(from_failure(message.failure))
            case PromptLogprobs():
                self._on_prompt_logprobs(message)
            case _:
                self._unexpected(message)

    def on_session_lost(self, member: Member, error: PdserveError) -> None:
        """The session that one of the two workers was reached through has ended.

        StepFailed: the worker ended itself. Only what it was computing may be to blame, and gets a strike.
        """
        if isinstance(error, StepFailed) and not self._is_computed_by(member):
            error = WorkerLost(error.message, **error.fields)
        if member is self.decode:
            self._decode_over = True
            self._fail(self._prefill_error or error)
        else:
            self._prefill_over = True
            self._lose_prefill(error)

    def _is_computed_by(self, member: Member) -> bool:
        if member is self.decode and self.started:
            return True
        prefills_there = member is (self.decode if self.prefill is None else self.prefill)
        return prefills_there and self.phase is AttemptPhase.PREFILLING

    def _refused(self, member: Member, message: Refused) -> None:
        """A worker never started it. If it can't now, nothing else is placed there before its next load report."""
        error = from_failure(message.failure)
        member.refusing = member.refusing or error.replayable
        self._end(Outcome(error, refused_by=member))

    # --- the grant

    def _on_granted(self, granted: Granted) -> None:
        has_lease = granted.lease_id != 0
        if self.phase not in (AttemptPhase.GRANTING, AttemptPhase.WAITING) or has_lease is (
            self.prefill is None
        ):
            self._unexpected(granted)
            return
        now_s = self._clock.now_s()
        self.times.granted_s = now_s
        self.phase_clock.enter(AttemptPhase.QUEUED)
        if self.prefill is None:
            return
        self._prefill_written = True
        start = self._start
        self.prefill.send(
            StartPrefill(
                handle=self.handle,
                token_ids=start.token_ids,
                num_prompt_tokens=start.num_prompt_tokens,
                key=start.key,
                deadline_left_s=self._deadline_left_s(),
                num_strikes=start.num_strikes,
                lease_id=granted.lease_id,
                decode_worker=self.decode.ref,
                num_skip_blocks=granted.num_cached_blocks,
                cache_salt=start.cache_salt,
                name=named_below(self.name, self.prefill_place),
            )
        )
        self.times.prefill_written_s = now_s

    # --- prefill

    def _on_prefill_progress(self, progress: Progress) -> None:
        grows = progress.phase is Phase.PREFILLING and progress.amount > self.prefilled_tokens
        if grows:
            self.prefilled_tokens = progress.amount
        if self.phase not in (AttemptPhase.QUEUED, AttemptPhase.PREFILLING):
            return
        if progress.phase is Phase.PREFILLING:
            if self.times.prefilling_s is None:
                self.times.prefilling_s = self._clock.now_s()
            self.phase_clock.enter(AttemptPhase.PREFILLING)
            if grows:  # a heartbeat that repeats the amount is no progress
                self.phase_clock.progress(AttemptPhase.PREFILLING)
        elif progress.phase in (Phase.QUEUED, Phase.PREEMPTED):
            self.phase_clock.enter(AttemptPhase.QUEUED)

    def _on_first_token(self, message: FirstToken) -> None:
        self.times.first_token, self.times.first_token_s = message, self._clock.now_s()
        self._choice.on_first_token(message)
        if message.final:
            # P hands nothing over; D still holds its grant, and close() aborts it.
            self._prefill_over = True
        elif not self.started:
            self.prefilled_tokens = len(self._start.token_ids)
            self.phase_clock.enter(AttemptPhase.HANDOFF)
            self.phase_clock.progress(AttemptPhase.HANDOFF)
        self._require_scores()
        is_news = not self._tokens.has_first
        self._tokens.take_first(message.token_id, message.logprobs)
        has_ended = self._choice.reason is not None
        if has_ended and is_news:
            self._end(Outcome())
        elif message.final and not has_ended:
            raise InvariantViolated("P called a token final that is not", token_id=message.token_id)

    def _lose_prefill(self, error: PdserveError) -> None:
        """P is out. Once StartPrefill was written, D alone knows whether the hand-off happened."""
        if self._tokens.lacks_scores:
            self._fail(error)  # D doesn't know them: nothing is lost by starting over
            return
        if self.started:
            return
        if not self._prefill_written:
            self._fail(error)
            return
        if self._prefill_error is None:
            self._prefill_error = error
        self.phase_clock.enter(AttemptPhase.HANDOFF)

    # --- the verdict, and what follows

    def _on_started(self, message: DecodeStarted) -> None:
        if self.started or self.phase in (AttemptPhase.GRANTING, AttemptPhase.WAITING):
            self._unexpected(message)
            return
        self.started = True
        self._prefill_error = None  # it came too late to matter
        self.times.started, self.times.started_s = message, self._clock.now_s()
        self._settle()
        self._choice.on_started(self.times, message)
        self.phase_clock.enter(AttemptPhase.RUNNING)
        if self.prefill is None:
            self._require_scores()
        self._tokens.take_first(message.first_token, message.logprobs)

    def _on_prompt_logprobs(self, message: PromptLogprobs) -> None:
        self._tokens.take_scores(message)
        if self._held_finish is not None and not self._tokens.lacks_scores:
            self._on_finished(self._held_finish)

    def _require_scores(self) -> None:
        """Whoever makes the prompt's logprobs says them before its first token."""
        if self._tokens.lacks_scores:
            raise InvariantViolated("a first token before all of the prompt's logprobs")

    def _on_decode_progress(self, progress: Progress) -> None:
        match progress.phase:
            case Phase.PULLING:
                if progress.amount > self._pull_progress:
                    self._pull_progress = progress.amount
                    self.phase_clock.progress(AttemptPhase.HANDOFF)
            case Phase.PREEMPTED:
                if self.started:
                    self.phase_clock.enter(AttemptPhase.PREEMPTED)
                elif self.prefill is None:
                    self._on_prefill_progress(progress)
            case Phase.RUNNING:
                if self.phase is AttemptPhase.PREEMPTED:
                    self.phase_clock.enter(AttemptPhase.RUNNING)
            case Phase.QUEUED | Phase.PREFILLING:
                if self.prefill is None:
                    self._on_prefill_progress(progress)

    def _on_finished(self, message: SequenceFinished) -> None:
        self._decode_over = True
        if self._tokens.lacks_scores:
            self._held_finish = message
            return
        if message.num_tokens != self._tokens.num_ids or not self._tokens.has_first:
            raise InvariantViolated(
                "the decode worker counts other tokens", want=self._tokens.num_ids, got=message.num_tokens
            )
        self._choice.on_finished(self.times, message)
        if self._choice.reason is None:
            raise InvariantViolated("the decode worker ended too early", reason=message.reason.value)
        self._end(Outcome())

    # --- end

    @property
    def has_first_token(self) -> bool:
        """Whether it is known, from whomever."""
        return self._tokens.has_first

    @property
    def ended(self) -> bool:
        """Whether its handle is closed."""
        return self.phase is AttemptPhase.ENDED

    def close(self) -> None:
        """Close the handle and stop what still runs on the workers. Idempotent; doesn't wait."""
        if self.ended:
            return
        self.phase_clock.enter(AttemptPhase.ENDED)
        self.times.ended_s = self._clock.now_s()
        if not self._decode_over:
            self.decode.abort(self.handle)
        if self.prefill is not None and not self._prefill_over and not self.started and self._prefill_written:
            self.prefill.abort(self.handle)
        if not self.has_first_token:
            (self.prefill or self.decode).accounting.withdraw(self.handle)
        self.decode.close_leg(self.handle)
        if self.prefill is not None:
            self.prefill.close_leg(self.handle)
        self._settle()

    def _settle(self) -> None:
        if self._on_settled is not None:
            on_settled, self._on_settled = self._on_settled, None
            on_settled()

    def _fail(self, error: PdserveError) -> None:
        """End by an error, unless all tokens have been given: then the choice is complete."""
        self._end(Outcome() if self._choice.reason is not None else Outcome(error))

    def _end(self, outcome: Outcome) -> None:
        if self.ended:
            return
        self.close()
        if not self.outcome.done():
            self.outcome.set_result(outcome)

    def _unexpected(self, message: AttemptMessage | StepTokens) -> None:
        self._fail(
            InvariantViolated(
                "a message that doesn't fit the attempt's state",
                got=type(message).__name__,
                phase=self.phase.value,
            )
        )

    def _late(self, error: WorkerLost) -> None:
        """The time of a phase is over. If P was lost before, that is why."""
        self._fail(self._prefill_error or error)
