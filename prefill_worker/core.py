"""The prefill worker's engine owner: queue, credits, chunked prefill, first token, offering.

    StartPrefill ─► queue ─► all blocks reserved ─► chunks, each offered when complete ─► first token, COMMIT
                                                                        ─► LeaseClosed ─► its blocks become cache

A synchronous class: a driver calls `handle` and `step` on the engine thread. Every accepted attempt ends here exactly
once: confirmed after its FirstToken, with Failed, or silently when its router asked for the end or is gone.
"""

from __future__ import annotations

from collections.abc import Mapping

import structlog

from kv_transfer.messages import LeaseClosed, LeaseReleased
from pdserve.engine.block_pool import BlockState
from pdserve.engine.events import ChunkDone, EngineEvent, PromptScored, RowDied, Sampled, StepDied
from pdserve.errors import (
    InvalidRequest,
    InvariantViolated,
    Overloaded,
    PdserveError,
    WorkerLost,
)
from pdserve.ids import WorkerRef
from pdserve.messages import (
    Credits,
    Demand,
    FirstToken,
    PromptLogprobs,
    StartDecode,
    StartPrefill,
)
from pdserve.tracing import Trace, TraceSpan
from pdserve.worker.desk import Desk, RoleBooks, RoleFigures
from pdserve.worker.messages import (
    FromSession,
    LinkChanged,
    SessionClosed,
    SessionOpened,
)
from pdserve.worker.role import CoreParts
from prefill_worker.attempt import PrefillAttempt, PrefillState
from prefill_worker.credits import CreditBook
from prefill_worker.offering import OfferedLease, Offering
from prefill_worker.spans import spans_of

log = structlog.get_logger()


class PrefillCore:
    """Owner of the engine in role prefill."""

    def __init__(self, parts: CoreParts) -> None:
        engine, timeouts = parts.engine, parts.config.timeouts
        self._engine = engine
        self._clock = parts.clock
        self._hold_s = timeouts.hold_s
        self._desk: Desk[PrefillAttempt] = Desk(parts, self, PrefillState)
        self._credits = CreditBook(
            queue_tokens=parts.config.worker.queue_tokens,
            block_size=engine.pool.block_size,
            window_tokens=engine.window_tokens,
        )
        self._offering = Offering(engine.pool, parts.to_transfer, parts.clock, timeouts.hold_s)
        self._links: dict[WorkerRef, None] = {}
        self._attempts = self._desk.attempts
        self._by_lease: dict[int, PrefillAttempt] = {}
        self._queue: list[PrefillAttempt] = []
        self._num_queued_tokens = 0

    # --- Owner

    def handle(self, message: object) -> None:
        match message:
            case LeaseClosed():
                self._on_lease_closed(message)
            case LinkChanged(decode_worker, up, _):
                if up:
                    self._links[decode_worker] = None
                else:
                    self._links.pop(decode_worker, None)
            case FromSession(session_id, Demand(num_queued_tokens)):
                self._credits.demand(session_id, num_queued_tokens)
            case SessionOpened(session_id):
                self._desk.handle(message)
                self._credits.open(session_id)
                self._tell_credits()
            case SessionClosed(session_id):
                self._desk.handle(message)
                self._credits.close(session_id)
                self._tell_credits()
            case LeaseReleased():
                pass  # one-sided readers are done before LeaseClosed at this end
            case _:
                self._desk.handle(message)

    @property
    def attempts(self) -> tuple[PrefillAttempt, ...]:
        """All that are in hand, oldest first; for tests and simulations."""
        return tuple(self._attempts.values())

    def step(self) -> float | None:
        if self._desk.begin_turn():
            self._credits.divide()
            self._leave_those_who_hold_on()
        self._begin_queued(self._clock.now_s())
        if self._engine.has_work:
            for event in self._engine.step():
                self._on_event(event)
            self._begin_queued(self._clock.now_s())  # room may have come free: no idle turn in between
        self._tell_credits()
        return self._desk.end_turn(num_left=len(self._attempts))

    # --- starts

    def start_attempt(self, start: StartPrefill | StartDecode, received: FromSession) -> None:
        session_id, num_tokens = received.session_id, len(start.token_ids)
        if isinstance(start, StartDecode):
            self._desk.refuse(session_id, start, InvalidRequest("this worker's role is prefill"))
            return
        if start.lease_id in self._by_lease:
            self._desk.ignore("attempt.repeated", start)
            return
        error = self._why_not(start)
        if error is None and not self._credits.take(session_id, num_tokens):
            error = Overloaded(
                "the prefill queue is full", queued_tokens=self._credits.used, bound=self._credits.bound
            )
        if error is not None:
            self._desk.refuse(session_id, start, error)
            return
        self._accept(start, received)

    def _why_not(self, start: StartPrefill) -> PdserveError | None:
        """What forbids to start it at all."""
        num_tokens = len(start.token_ids)
        if num_tokens < 1 or num_tokens > self._engine.window_tokens:
            return InvalidRequest(
                "a prompt must fit the window", tokens=num_tokens, window=self._engine.window_tokens
            )
        if start.num_skip_blocks > num_tokens // self._engine.pool.block_size:
            return InvalidRequest(
                "more blocks to skip than are full", skip=start.num_skip_blocks, tokens=num_tokens
            )
        if start.decode_worker not in self._links:
            return WorkerLost("no link to that decode worker is up", decode_worker=str(start.decode_worker))
        return None

    def _accept(self, start: StartPrefill, received: FromSession) -> None:
        num_tokens, received_s = len(start.token_ids), self._desk.received_s(received)
        num_blocks = -(-num_tokens // self._engine.pool.block_size)
        ends_here = start.key.next_is_last(num_tokens, start.num_prompt_tokens)
        lease = OfferedLease(
            lease_id=start.lease_id,
            handle=start.handle,
            name=start.name,
            decode_worker=start.decode_worker,
            num_blocks=num_blocks,
            num_skip=num_blocks if ends_here else start.num_skip_blocks,
            upto=num_blocks if ends_here else start.num_skip_blocks,
        )
        # Of a hit there is KV, but no logits.
        takes_hits = start.key.params.prompt_logprobs is None
        attempt = PrefillAttempt(
            handle=start.handle,
            session_id=received.session_id,
            seq=self._desk.sequence(start, received, takes_hits=takes_hits),
            received_s=received_s,
            progress_s=received_s,
            lease=lease,
            num_tokens=num_tokens,
            ends_here=ends_here,
        )
        self._desk.take_in(attempt, start)
        self._by_lease[start.lease_id] = attempt
        self._queue.append(attempt)
        self._num_queued_tokens += num_tokens
        self._offering.open(lease)
        self._tell_credits()  # first: from Progress on the router counts this prompt as taken off the balance
        self._desk.say_progress(attempt)

    # --- the queue

    def _begin_queued(self, now_s: float) -> None:
        """Start what fits, in order. A prompt whose lane (short or long) has a step's work lets the other lane pass,
        one that must wait for its link lets prompts for other links pass, one that must wait for blocks nobody.
        """
        limits = self._engine.limits
        to_compute = {True: 0, False: 0}
        for seq in self._engine.sequences:
            to_compute[limits.is_short(seq.num_uncomputed)] += seq.num_uncomputed
        blocked: dict[WorkerRef, None] = {}
        for attempt in list(self._queue):
            decode_worker = attempt.lease.decode_worker
            if to_compute[limits.is_short(attempt.num_tokens)] >= limits.max_step_tokens:
                continue
            waits_for_link = not attempt.ends_here
            if waits_for_link and decode_worker in blocked:
                continue
            if waits_for_link and not self._offering.may_begin(attempt.lease):
                blocked[decode_worker] = None
                continue
            if not self._engine.reserve_prefill(attempt.seq, then_decode=False):
                return
            self._begin(attempt, now_s)
            num_tokens = attempt.seq.num_uncomputed
            to_compute[limits.is_short(num_tokens)] += num_tokens

    def _begin(self, attempt: PrefillAttempt, now_s: float) -> None:
        self._queue.remove(attempt)
        self._give_credit_back(attempt)
        attempt.move(PrefillState.PREFILLING, now_s)
        attempt.begun_s = now_s
        self._offering.begin(attempt.lease)
        self._engine.start_prefill(attempt.seq, then_decode=False)
        self._offer(attempt, attempt.seq.num_computed)
        self._desk.say_progress(attempt)

    def _offer(self, attempt: PrefillAttempt, num_computed: int) -> None:
        if attempt.ends_here:
            return  # nobody would use it
        block_size = self._engine.pool.block_size
        complete = num_computed == attempt.num_tokens
        upto = attempt.lease.num_blocks if complete else num_computed // block_size
        self._offering.offer(attempt.lease, attempt.seq.block_table, upto)

    # --- the engine's events

    def _on_event(self, event: EngineEvent) -> None:
        match event:
            case ChunkDone(seq, num_computed):
                attempt = self._attempts[seq.handle]
                self._offer(attempt, num_computed)
                if attempt.trace is not None:
                    attempt.note_moment(
                        "chunk", self._clock.now_s(), **{"pdserve.computed_tokens": num_computed}
                    )
                if num_computed < attempt.num_tokens:
                    self._desk.say_progress(attempt)
            case PromptScored(seq, first, logprobs):
                self._desk.send(seq.session_id, PromptLogprobs(seq.handle, first, logprobs))
            case Sampled(seq):
                self._on_sampled(self._attempts[seq.handle], event)
            case RowDied(seq, error):
                self.fail_attempt(self._attempts[seq.handle], error, cache=False)
            case StepDied():
                self._desk.step_died(event)
            case _:
                raise InvariantViolated("not an event of a prefill worker", kind=type(event).__name__)

    def _on_sampled(self, attempt: PrefillAttempt, sampled: Sampled) -> None:
        now_s = attempt.sampled_s = self._clock.now_s()
        self._desk.num_generated_tokens += 1
        self._desk.send(
            attempt.session_id,
            FirstToken(
                handle=attempt.handle,
                token_id=sampled.token_id,
                logprobs=sampled.logprobs,
                reason=sampled.finish,
                num_cached_tokens=attempt.seq.num_cached_tokens,
                queue_s=attempt.begun_s - attempt.received_s,
                prefill_s=now_s - attempt.begun_s,
                energy_j=attempt.seq.energy.prefill_j,
            ),
        )
        if sampled.finish is None:
            attempt.move(PrefillState.SAMPLED, now_s)
            self._offering.commit(attempt.lease, sampled.token_id, sampled.logprobs)
        else:
            attempt.note_end(sampled.finish.value)
            attempt.move(PrefillState.ENDED, now_s)
        self._engine.end(attempt.seq)  # what is offered stays referenced by the lease

    # --- ends

    def _on_lease_closed(self, closed: LeaseClosed) -> None:
        attempt = self._by_lease.get(closed.lease_id)
        if attempt is None:
            raise InvariantViolated("a lease closed that was never opened", lease=closed.lease_id)
        if closed.error is None and attempt.state not in (PrefillState.SAMPLED, PrefillState.ENDED):
            raise InvariantViolated("confirmed before it was committed", lease=closed.lease_id)
        if closed.error is not None and attempt.state is not PrefillState.ENDED:
            log.info(
                "lease.lost", lease=closed.lease_id, handle=attempt.handle, **attempt.name.logged,
                peer=str(attempt.lease.decode_worker), link_lost=closed.link_lost,
                error=type(closed.error).__name__, reason=str(closed.error),
            )  # fmt: skip
            self._desk.say_failed(attempt, closed.error)
        self._stop(attempt, hold_s=self._hold_s if closed.link_lost else None)
        self._offering.close(closed)
        del self._by_lease[closed.lease_id]
        attempt.note_end("handed_off")
        self._desk.let_go(attempt)

    def end_attempt(self, attempt: PrefillAttempt, error: PdserveError) -> None:
        self._stop(attempt)
        self._offering.give_up(attempt.lease, error)

    def fail_attempt(self, attempt: PrefillAttempt, error: PdserveError, *, cache: bool = True) -> None:
        """The decode worker is told, too."""
        if attempt.state is not PrefillState.ENDED:
            self._desk.say_failed(attempt, error)
        self._stop(attempt, cache=cache)
        self._offering.give_up(attempt.lease, error)

    def _leave_those_who_hold_on(self) -> None:
        """Decode workers that should have let go of an ended attempt's lease long ago."""
        for attempt in self._attempts.values():
            if attempt.is_stuck_logged and attempt.state is PrefillState.ENDED:
                waited_s = round(self._clock.now_s() - attempt.progress_s, 3)
                error = WorkerLost("the decode worker doesn't let go", waited_s=waited_s)
                self._offering.give_up(attempt.lease, error)

    def _stop(self, attempt: PrefillAttempt, *, hold_s: float | None = None, cache: bool = True) -> None:
        """Take it out of the queue and the engine. The lease's own references last until LeaseClosed."""
        if attempt.state is PrefillState.QUEUED:
            self._queue.remove(attempt)
        self._give_credit_back(attempt)
        attempt.move(PrefillState.ENDED, self._clock.now_s())
        self._engine.end(attempt.seq, hold_s=hold_s, cache=cache)

    def _give_credit_back(self, attempt: PrefillAttempt) -> None:
        if attempt.holds_credit:
            attempt.holds_credit = False
            self._num_queued_tokens -= attempt.num_tokens
            self._credits.give_back(attempt.session_id, attempt.num_tokens)

    # --- answers

    def _tell_credits(self) -> None:
        for session_id, balance in self._credits.news():
            self._desk.send(session_id, Credits(balance))

    def spans(self, attempt: PrefillAttempt, trace: Trace, end_s: float) -> list[TraceSpan]:
        return spans_of(attempt, trace, end_s)

    def books(self) -> RoleBooks:
        is_wrong = self._credits.used != self._num_queued_tokens
        num_leases = len(self._by_lease)
        if not is_wrong and num_leases == len(self._offering) == len(self._attempts):
            return RoleBooks(num_quarantined=self._engine.pool.num_condemned)
        return RoleBooks(wrong="credits" if is_wrong else "leases")

    def held_blocks(self) -> Mapping[BlockState, Mapping[int, int | None]]:
        owned: dict[int, int | None] = {}
        for attempt in self._attempts.values():
            owned |= dict.fromkeys((*attempt.seq.block_table, *attempt.lease.pinned), attempt.handle)
        return {BlockState.GRANTED: {}, BlockState.OWNED: owned, BlockState.QUARANTINED: {}}

    def figures(self) -> RoleFigures:
        is_short = self._engine.limits.is_short
        short = sum(attempt.num_tokens for attempt in self._queue if is_short(attempt.num_tokens))
        return RoleFigures(
            num_waiting=len(self._queue),
            num_queued_tokens=self._credits.used,
            num_queued_short_tokens=short,
        )
