"""The prefill worker's engine owner: queue, credits, chunked prefill, first token, offering.

    StartPrefill ─► queue ─► all blocks reserved ─► chunks, each offered when complete ─► first token, COMMIT
                                                                        ─► LeaseClosed ─► its blocks become cache

A synchronous class: a driver calls `handle` and `step` on the engine thread. Every accepted attempt ends here exactly
once: confirmed after its FirstToken, with Failed, or silently when its router asked for the end or is gone.
"""

from __future__ import annotations

import structlog

from kv_transfer.messages import LeaseClosed, Released
from pdserve.engine.events import ChunkDone, EngineEvent, PromptScored, RowDied, Sampled, StepDied
from pdserve.engine.sequence import Sequence
from pdserve.errors import (
    DeadlineExceeded,
    Draining,
    InvalidRequest,
    InvariantViolated,
    Overloaded,
    PdserveError,
    RequestCancelled,
    StepFailed,
    WorkerLost,
)
from pdserve.ids import WorkerRef
from pdserve.messages import (
    Abort,
    Credits,
    Demand,
    FirstToken,
    Load,
    Progress,
    PromptLogprobs,
    StartDecode,
    StartPrefill,
)
from pdserve.token_matcher import TokenMatcher
from pdserve.worker.deadlines import Deadlines
from pdserve.worker.drain import Drain
from pdserve.worker.messages import (
    BeginDrain,
    CoreCounts,
    FromSession,
    LinkChanged,
    SessionClosed,
    SessionOpened,
)
from pdserve.worker.replies import Replies
from pdserve.worker.reporter import Reporter
from pdserve.worker.role import CoreParts
from pdserve.worker.strikes import error_after
from prefill_worker.attempt import PrefillAttempt, PrefillState
from prefill_worker.credits import CreditBook
from prefill_worker.offering import Lease, Offering

log = structlog.get_logger()

_STUCK_S = 5.0


class PrefillCore:
    """Owner of the engine in role prefill."""

    def __init__(self, parts: CoreParts) -> None:
        engine, timeouts = parts.engine, parts.config.timeouts
        self._engine = engine
        self._clock = parts.clock
        self._hold_s = timeouts.hold_s
        self._replies = Replies(parts.to_loop)
        self._reporter = Reporter(engine.pool, parts.meter, parts.to_loop, parts.clock, timeouts.heartbeat_s)
        self._credits = CreditBook(
            queue_tokens=parts.config.worker.queue_tokens,
            block_size=engine.pool.block_size,
            window_tokens=engine.window_tokens,
        )
        self._offering = Offering(engine.pool, parts.to_transfer, parts.clock, timeouts.hold_s)
        self._links: dict[WorkerRef, str] = {}
        self._attempts: dict[int, PrefillAttempt] = {}
        self._by_lease: dict[int, PrefillAttempt] = {}
        self._queue: list[PrefillAttempt] = []
        self._deadlines = Deadlines()
        self._drain = Drain(parts.to_loop)
        self._num_prefilled_tokens = 0
        self._num_sampled = 0

    # --- Owner

    def handle(self, message: object) -> None:
        match message:
            case FromSession():
                self._on_session_message(message)
            case LeaseClosed():
                self._on_lease_closed(message)
            case LinkChanged(decode_worker, up, _):
                if up:
                    self._links[decode_worker] = decode_worker.id
                else:
                    self._links.pop(decode_worker, None)
            case SessionOpened(session_id, router_id):
                self._replies.open(session_id, router_id)
                self._credits.open(session_id)
                self._tell_credits()
            case SessionClosed(session_id):
                self._on_session_closed(session_id)
            case BeginDrain(drain_s):
                self._drain.begin(self._clock.now_s() + drain_s)
            case Released():
                pass  # one-sided readers are done before LeaseClosed at this end
            case _:
                raise InvariantViolated("a message that no prefill worker takes", kind=type(message).__name__)

    @property
    def attempts(self) -> tuple[PrefillAttempt, ...]:
        """All that are in hand, oldest first; for tests and simulations."""
        return tuple(self._attempts.values())

    def step(self) -> float | None:
        now_s = self._clock.now_s()
        for handle in self._deadlines.due(now_s):
            self._expire(handle)
        if self._drain.limit_passes(now_s):
            for attempt in list(self._attempts.values()):
                self._fail(attempt, Draining("the worker is draining"))
        if self._reporter.heartbeat_due():
            self._heartbeat(now_s)
        self._begin_queued(now_s)
        if self._engine.has_work:
            for event in self._engine.step():
                self._on_event(event)
            self._begin_queued(self._clock.now_s())  # room may have come free: no idle turn in between
        self._tell_credits()
        self._drain.note_rest(len(self._attempts))
        self._reporter.end_turn(has_work=self._engine.has_work, load=self._load())
        return 0.0 if self._engine.has_work else self._wait_s(self._clock.now_s())

    # --- messages of routers

    def _on_session_message(self, received: FromSession) -> None:
        session_id = received.session_id
        if session_id not in self._replies:
            return  # it ended while this was on its way
        match received.message:
            case StartPrefill() as start:
                self._on_start(start, received)
            case Abort(handle):
                self._end_silently(
                    self._attempts.get(handle), session_id, RequestCancelled("aborted by the router")
                )
            case Demand(num_queued_tokens):
                self._credits.demand(session_id, num_queued_tokens)
            case StartDecode(handle=handle):
                self._replies.refuse(session_id, handle, InvalidRequest("this worker's role is prefill"))
            case other:
                raise InvariantViolated("not for the engine", kind=type(other).__name__)

    def _on_start(self, start: StartPrefill, received: FromSession) -> None:
        session_id = received.session_id
        if start.handle in self._attempts or start.lease_id in self._by_lease:
            self._replies.ignore("attempt.repeated", handle=start.handle, lease=start.lease_id)
            return
        error = self._why_not(start, received.matcher)
        num_tokens = len(start.token_ids)
        if error is None and not self._credits.take(session_id, num_tokens):
            error = Overloaded(
                "the prefill queue is full", queued_tokens=self._credits.used, bound=self._credits.bound
            )
        if error is not None:
            self._replies.refuse(session_id, start.handle, error)
            return
        self._accept(start, received)

    def _why_not(self, start: StartPrefill, matcher: TokenMatcher | None) -> PdserveError | None:
        """What forbids to start it at all."""
        num_tokens = len(start.token_ids)
        if self._drain.has_begun:
            return Draining("the worker takes no new work")
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
        if matcher is None and start.key.params.structure is not None:
            return InvariantViolated("a structure without its matcher", handle=start.handle)
        return None

    def _accept(self, start: StartPrefill, received: FromSession) -> None:
        session_id, num_tokens = received.session_id, len(start.token_ids)
        received_s = self._clock.now_s() if received.received_s is None else received.received_s
        seq = Sequence(
            handle=start.handle,
            session_id=session_id,
            ids=list(start.token_ids),
            num_prompt_tokens=start.num_prompt_tokens,
            key=start.key,
            matcher=received.matcher,
            cache_salt=start.cache_salt,
            num_strikes=start.num_strikes,
            takes_hits=start.key.params.prompt_logprobs is None,  # of a hit there is KV, but no logits
        )
        lease = Lease(
            lease_id=start.lease_id,
            handle=start.handle,
            decode_worker=start.decode_worker,
            num_blocks=-(-num_tokens // self._engine.pool.block_size),
            num_skip=start.num_skip_blocks,
            upto=start.num_skip_blocks,
        )
        attempt = PrefillAttempt(
            start.handle, session_id, seq, lease, num_tokens, received_s, since_s=received_s
        )
        self._attempts[start.handle] = attempt
        self._by_lease[start.lease_id] = attempt
        self._queue.append(attempt)
        self._deadlines.add(start.handle, received_s + start.deadline_left_s)
        self._offering.open(lease)
        self._tell_credits()  # first: from Progress on the router counts this prompt as taken off the balance
        self._say_progress(attempt)

    def _on_session_closed(self, session_id: int) -> None:
        self._replies.close(session_id)
        for attempt in [attempt for attempt in self._attempts.values() if attempt.session_id == session_id]:
            self._end_silently(attempt, session_id, WorkerLost("the router's session has ended"))
        self._credits.close(session_id)
        self._tell_credits()

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
            if decode_worker in blocked:
                continue
            if not self._offering.may_begin(attempt.lease):
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
        self._say_progress(attempt)

    def _offer(self, attempt: PrefillAttempt, num_computed: int) -> None:
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
                if num_computed < attempt.num_tokens:
                    self._say_progress(attempt)
            case PromptScored(seq, first, logprobs):
                self._replies.send(
                    self._attempts[seq.handle].session_id, PromptLogprobs(seq.handle, first, logprobs)
                )
            case Sampled(seq):
                self._on_sampled(self._attempts[seq.handle], event)
            case RowDied(seq, error):
                self._fail(self._attempts[seq.handle], error, cache=False)
            case StepDied():
                self._on_step_died(event)
            case _:
                raise InvariantViolated("not an event of a prefill worker", kind=type(event).__name__)

    def _on_sampled(self, attempt: PrefillAttempt, sampled: Sampled) -> None:
        now_s = self._clock.now_s()
        self._num_sampled += 1
        self._num_prefilled_tokens += attempt.num_tokens - attempt.seq.num_cached_tokens
        self._replies.send(
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
            attempt.move(PrefillState.ENDED, now_s)
        self._engine.end(attempt.seq)  # what is offered stays referenced by the lease

    def _on_step_died(self, died: StepDied) -> None:
        for seq in died.seqs:
            self._fail(self._attempts[seq.handle], error_after(died, seq), cache=False)
        if not died.sound:
            raise StepFailed("the engine's state isn't sound after a failed step") from died.error

    # --- ends

    def _on_lease_closed(self, closed: LeaseClosed) -> None:
        attempt = self._by_lease.get(closed.lease_id)
        if attempt is None:
            raise InvariantViolated("a lease closed that was never opened", lease=closed.lease_id)
        if closed.error is None and attempt.state not in (PrefillState.SAMPLED, PrefillState.ENDED):
            raise InvariantViolated("confirmed before it was committed", lease=closed.lease_id)
        if closed.error is not None:
            log.info(
                "lease.lost", lease=closed.lease_id, handle=attempt.handle,
                peer=str(attempt.lease.decode_worker), link_lost=closed.link_lost,
                error=type(closed.error).__name__, reason=str(closed.error),
            )  # fmt: skip
        if closed.error is not None and attempt.state is not PrefillState.ENDED:
            self._replies.fail(attempt.session_id, attempt.handle, closed.error)
        self._stop(attempt, hold_s=self._hold_s if closed.link_lost else None)
        self._offering.close(closed)
        del self._by_lease[closed.lease_id]
        del self._attempts[attempt.handle]

    def _expire(self, handle: int) -> None:
        attempt = self._attempts.get(handle)
        if attempt is not None and attempt.state in (PrefillState.QUEUED, PrefillState.PREFILLING):
            self._fail(attempt, DeadlineExceeded("the deadline has passed", phase=attempt.phase.value))

    def _end_silently(self, attempt: PrefillAttempt | None, session_id: int, error: PdserveError) -> None:
        """Its router wants no answer: stop it and give the lease up."""
        if attempt is None or attempt.session_id != session_id:
            return
        self._stop(attempt)
        self._offering.give_up(attempt.lease, error)

    def _fail(self, attempt: PrefillAttempt, error: PdserveError, *, cache: bool = True) -> None:
        """End it by an error of this side: the router and the decode worker are told."""
        if attempt.state is not PrefillState.ENDED:
            self._replies.fail(attempt.session_id, attempt.handle, error)
        self._stop(attempt, cache=cache)
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
            self._credits.give_back(attempt.session_id, attempt.num_tokens)

    # --- what is said

    def _heartbeat(self, now_s: float) -> None:
        self._credits.divide()
        for attempt in self._attempts.values():
            if attempt.state in (PrefillState.QUEUED, PrefillState.PREFILLING):
                self._say_progress(attempt)
            age_s = now_s - attempt.since_s
            if age_s >= _STUCK_S and not attempt.slow_logged:
                attempt.slow_logged = True
                log.warning(
                    "attempt.stuck", handle=attempt.handle, state=attempt.state.value,
                    peer=str(attempt.lease.decode_worker), age_s=round(age_s, 3),
                )  # fmt: skip
                if attempt.state is PrefillState.ENDED:  # the decode worker should have let go long ago
                    error = WorkerLost("the decode worker doesn't let go", waited_s=round(age_s, 3))
                    self._offering.give_up(attempt.lease, error)
        self._reporter.count(self._count())

    def _tell_credits(self) -> None:
        for session_id, balance in self._credits.news():
            self._replies.send(session_id, Credits(balance))

    def _say_progress(self, attempt: PrefillAttempt) -> None:
        self._replies.send(
            attempt.session_id, Progress(attempt.handle, attempt.phase, attempt.seq.num_computed)
        )

    def _load(self) -> Load:
        engine, limits = self._engine.load(), self._engine.limits
        short = sum(attempt.num_tokens for attempt in self._queue if limits.is_short(attempt.num_tokens))
        return Load(
            blocks=self._engine.pool.counts(),
            num_running=engine.num_running,
            num_waiting=len(self._queue),
            num_queued_tokens=self._credits.used + engine.num_queued_tokens,
            num_queued_short_tokens=short + engine.num_queued_short_tokens,
            chunk_tokens=limits.chunk_tokens,
            num_cache_hit_tokens=engine.num_cache_hit_tokens,
            num_cache_query_tokens=engine.num_cache_query_tokens,
            prefill_tokens_per_s=engine.prefill_tokens_per_s,
            step_s=engine.step_s,
            slowest_step_s=engine.slowest_step_s,
            draining=self._drain.has_begun,
        )

    def _count(self) -> CoreCounts:
        engine = self._engine.load()
        return CoreCounts(
            num_prefilled_tokens=self._num_prefilled_tokens,
            num_generated_tokens=self._num_sampled,
            num_cache_query_tokens=engine.num_cache_query_tokens,
            num_cache_hit_tokens=engine.num_cache_hit_tokens,
            num_ignored=self._replies.num_ignored,
            failures=self._replies.failures,
            num_masks=self._engine.num_masks,
            mask_s=self._engine.mask_s,
            prefill_energy_j=self._engine.energy.prefill_j,
            decode_energy_j=self._engine.energy.decode_j,
        )

    def _wait_s(self, now_s: float) -> float:
        """Until the next thing that no message announces."""
        moments = [moment for moment in (self._deadlines.next_s, self._drain.next_s) if moment is not None]
        return min([self._reporter.wait_s(), *(max(moment - now_s, 0.001) for moment in moments)])
