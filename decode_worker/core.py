"""The decode worker's engine owner: grants, waiting list, intake of handed-off KV, continuous batching, tokens.

    StartDecode ─► waiting ─► granted ─► bound, pulled ─► HandedOff ─► runs ─► Finished
                      │          └── ended by whom ever ─► Retired ─► blocks free
                      └── without a source: prefilled here ─► runs

The role `both` is this core over an engine without a bound on prefill tokens in a step. A synchronous class: a driver
calls `handle` and `step` on the engine thread. Every grant is answered exactly once, with Started or Failed, unless
its router asked for the end or is gone.
"""

from __future__ import annotations

import structlog

from decode_worker.admission import Admission
from decode_worker.answers import finished, started_by_hand_off, started_here, step_tokens
from decode_worker.attempt import DecodeAttempt, DecodeState
from decode_worker.grants import Grant, Grants
from kv_transfer.messages import BindWanted, HandedOff, PullProgress, Released, Retired
from pdserve.engine.events import (
    ChunkDone,
    EngineEvent,
    HandedBackSeq,
    Preempted,
    PromptScored,
    RowDied,
    Sampled,
    StepDied,
)
from pdserve.engine.sequence import Sequence
from pdserve.errors import (
    DeadlineExceeded,
    Draining,
    HandedBack,
    InvalidRequest,
    InvariantViolated,
    Overloaded,
    PdserveError,
    RequestCancelled,
    Revoked,
    RowFailed,
    StepFailed,
    WorkerLost,
)
from pdserve.messages import (
    Abort,
    Demand,
    Load,
    Progress,
    PromptLogprobs,
    StartDecode,
    StartPrefill,
    Step,
    StepTokens,
    Up,
    Waiting,
)
from pdserve.sampling import FinishReason
from pdserve.token_matcher import TokenMatcher, finish_by
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

log = structlog.get_logger()

_STUCK_S = 5.0
_RETRY_AFTER_S = 1.0


class DecodeCore:
    """Owner of the engine in the roles decode and both."""

    def __init__(self, parts: CoreParts) -> None:
        engine, heartbeat_s = parts.engine, parts.config.timeouts.heartbeat_s
        self._engine = engine
        self._meter = parts.meter
        self._clock = parts.clock
        self._replies = Replies(parts.to_loop)
        self._reporter = Reporter(engine.pool, parts.meter, parts.to_loop, parts.clock, heartbeat_s)
        self._grants = Grants(engine, parts.to_transfer, parts.random)
        self._admission = Admission(engine, self._grants, parts.config.worker.max_waiting)
        self._attempts: dict[int, DecodeAttempt] = {}
        self._deadlines = Deadlines()
        self._drain = Drain(parts.to_loop)
        self._num_accepted = 0
        self._num_prefilled_tokens = 0
        self._num_generated_tokens = 0
        self._num_preemptions = 0
        self._num_revocations = 0
        engine.revoke_with(self._revoke_one)

    # --- Owner

    def handle(self, message: object) -> None:
        match message:
            case FromSession():
                self._on_session_message(message)
            case BindWanted(lease_id):
                self._grants.bind(lease_id)
            case PullProgress(lease_id, num_received):
                self._grants.note_received(lease_id, num_received)
            case HandedOff():
                self._on_handed_off(message)
            case Retired():
                self._on_retired(message)
            case Released(lease_id):
                self._grants.release_quarantined(lease_id)
            case SessionOpened(session_id, router_id):
                self._replies.open(session_id, router_id)
            case SessionClosed(session_id):
                self._on_session_closed(session_id)
            case BeginDrain(drain_s):
                self._begin_drain(drain_s)
            case LinkChanged():
                pass  # what a lost link means for a grant comes as Retired
            case _:
                raise InvariantViolated("a message that no decode worker takes", kind=type(message).__name__)

    @property
    def attempts(self) -> tuple[DecodeAttempt, ...]:
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
        while (grant := self._admission.revocable_ahead()) is not None:
            self._revoke(grant)
        if self._engine.has_work:
            self._take_events(self._engine.step())
        self._grant_waiting(self._clock.now_s())
        self._drain.note_rest(len(self._attempts) + len(self._grants))
        self._reporter.end_turn(has_work=self._engine.has_work, load=self._load())
        return 0.0 if self._engine.has_work else self._wait_s(self._clock.now_s())

    # --- messages of routers

    def _on_session_message(self, received: FromSession) -> None:
        session_id = received.session_id
        if session_id not in self._replies:
            return  # it ended while this was on its way
        match received.message:
            case StartDecode() as start:
                self._on_start(start, received)
            case Abort(handle):
                attempt = self._attempts.get(handle)
                if attempt is not None and attempt.session_id == session_id:
                    self._end(attempt, RequestCancelled("aborted by the router"))
            case Demand():
                pass  # credits are a prefill worker's
            case StartPrefill(handle=handle):
                error = InvalidRequest("this worker prefills for no other worker")
                self._replies.refuse(session_id, handle, error)
            case other:
                raise InvariantViolated("not for the engine", kind=type(other).__name__)

    def _on_start(self, start: StartDecode, received: FromSession) -> None:
        session_id = received.session_id
        if start.handle in self._attempts:
            self._replies.ignore("attempt.repeated", handle=start.handle)
            return
        error = self._why_not(start, received.matcher)
        if error is not None:
            self._replies.refuse(session_id, start.handle, error)
            return
        now_s = self._clock.now_s()
        attempt = self._new_attempt(start, received)
        self._attempts[attempt.handle] = attempt
        self._admission.add(attempt)
        self._grant_waiting(now_s)
        if attempt.state is DecodeState.WAITING and self._admission.is_over_bound:
            self._drop(attempt)
            num_waiting = self._admission.num_waiting
            full = Overloaded("the waiting list is full", retry_after_s=_RETRY_AFTER_S, waiting=num_waiting)
            self._replies.refuse(session_id, start.handle, full)
        self._say_places()

    def _why_not(self, start: StartDecode, matcher: TokenMatcher | None) -> PdserveError | None:
        """What forbids to ever start it here."""
        num_final = start.num_prompt_tokens + start.key.max_tokens
        if self._drain.has_begun:
            return Draining("the worker takes no new work")
        if num_final > self._engine.window_tokens:
            return InvalidRequest(
                "prompt and max_tokens must fit the window",
                tokens=num_final,
                window=self._engine.window_tokens,
            )
        if not 0 < start.num_prompt_tokens <= len(start.token_ids) < num_final:
            return InvalidRequest(
                "nothing to generate",
                ids=len(start.token_ids),
                prompt=start.num_prompt_tokens,
                final=num_final,
            )
        if matcher is None and start.key.params.structure is not None:
            return InvariantViolated("a structure without its matcher", handle=start.handle)
        return None

    def _new_attempt(self, start: StartDecode, received: FromSession) -> DecodeAttempt:
        session_id = received.session_id
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
            # Prefilled here, prompt logprobs need the logits of every position, which a hit hasn't.
            takes_hits=start.source is not None or start.key.params.prompt_logprobs is None,
        )
        self._num_accepted += 1
        self._deadlines.add(start.handle, received_s + start.deadline_left_s)
        return DecodeAttempt(
            handle=start.handle,
            session_id=session_id,
            seq=seq,
            source=start.source,
            priority=start.priority,
            since_s=received_s - start.age_s,
            received_s=received_s,
            serial=self._num_accepted,
            moved_s=received_s,
        )

    def _on_session_closed(self, session_id: int) -> None:
        self._replies.close(session_id)
        for attempt in [attempt for attempt in self._attempts.values() if attempt.session_id == session_id]:
            self._end(attempt, WorkerLost("the router's session has ended"))

    # --- grants

    def _grant_waiting(self, now_s: float) -> None:
        granted = self._admission.grant(now_s)
        for attempt, answer in granted:
            self._send(attempt, answer)
        if granted:
            self._say_places()

    def _revoke_one(self) -> bool:
        """Called by the engine when a running sequence needs a block. True if blocks are free by it at once."""
        grant = self._grants.youngest_revocable()
        if grant is None:
            return False
        self._revoke(grant)
        return not grant.is_bound

    def _revoke(self, grant: Grant) -> None:
        """Take a grant back for older sequences."""
        self._num_revocations += 1
        log.info("grant.revoked", handle=grant.attempt.handle, lease=grant.lease_id, bound=grant.is_bound)
        error = Revoked("the grant was taken back for older sequences", lease_id=grant.lease_id)
        self._fail(grant.attempt, error)

    def _on_handed_off(self, handed_off: HandedOff) -> None:
        grant = self._grants.adopt(handed_off.lease_id)
        if grant is None:
            return  # ended by this side meanwhile; answered already
        attempt, seq = grant.attempt, grant.attempt.seq
        now_s = self._clock.now_s()
        seq.block_table = [*grant.hits, *grant.block_ids]
        seq.num_cached_tokens = len(grant.hits) * self._engine.pool.block_size
        seq.admitted_s = attempt.admitted_s
        seq.ids.append(handed_off.first_token)
        attempt.move(DecodeState.ACTIVE, now_s)
        attempt.started_s = now_s if handed_off.confirmed_s is None else handed_off.confirmed_s
        self._engine.start_decode(seq)
        try:
            reason = finish_by(seq.key, handed_off.first_token, seq.num_generated, seq.matcher)
        except RowFailed as error:
            self._fail(attempt, error)
            return
        self._send(attempt, started_by_hand_off(attempt, handed_off))
        if reason is not None:  # the prefill worker should have called it final
            self._finish(attempt, reason)

    def _on_retired(self, retired: Retired) -> None:
        grant = self._grants.retire(retired)
        if not grant.ended:
            log.info(
                "lease.lost", lease=grant.lease_id, handle=grant.attempt.handle,
                peer=str(grant.source), quarantine=retired.quarantine,
                error=type(retired.error).__name__, reason=str(retired.error),
            )  # fmt: skip
            self._fail(grant.attempt, retired.error)

    # --- the engine's events

    def _take_events(self, events: list[EngineEvent]) -> None:
        """Tokens of one step go out in one message a session, before what ends a sequence in the same step."""
        tokens: dict[int, list[StepTokens]] = {}
        ends: list[EngineEvent] = []
        for event in events:
            match event:
                case Sampled(seq=seq, finish=finish):
                    self._take_token(self._attempts[seq.handle], event, tokens)
                    if finish is not None:
                        ends.append(event)
                case PromptScored(seq, first, logprobs):
                    self._send(self._attempts[seq.handle], PromptLogprobs(seq.handle, first, logprobs))
                case ChunkDone(seq):
                    self._say_progress(self._attempts[seq.handle])
                case Preempted(seq):
                    self._num_preemptions += 1
                    self._say_progress(self._attempts[seq.handle])
                case RowDied() | StepDied() | HandedBackSeq():
                    ends.append(event)
        for session_id, of_session in tokens.items():
            self._replies.send(session_id, Step(tuple(of_session)))
        for event in ends:
            self._take_end(event)

    def _take_token(
        self, attempt: DecodeAttempt, sampled: Sampled, tokens: dict[int, list[StepTokens]]
    ) -> None:
        seq = sampled.seq
        self._num_generated_tokens += 1
        if sampled.first:
            attempt.started_s = self._clock.now_s()
            self._num_prefilled_tokens += len(seq.ids) - 1 - seq.num_cached_tokens
            self._send(attempt, started_here(attempt, sampled))
            return
        if attempt.decode_queue_s is None:
            attempt.decode_queue_s = max(self._meter.begun_s - attempt.started_s, 0.0)
            attempt.decode_step_s = self._meter.step_s
        tokens.setdefault(attempt.session_id, []).append(step_tokens(attempt, sampled))

    def _take_end(self, event: EngineEvent) -> None:
        match event:
            case Sampled(seq=seq, finish=finish) if finish is not None:
                self._finish(self._attempts[seq.handle], finish)
            case RowDied(seq, error):
                self._fail(self._attempts[seq.handle], error, cache=False)
            case HandedBackSeq(seq):
                handed_back = HandedBack("too long to be recomputed here", tokens=len(seq.ids))
                self._fail(self._attempts[seq.handle], handed_back)
            case StepDied():
                self._on_step_died(event)

    def _on_step_died(self, died: StepDied) -> None:
        for seq in died.seqs:
            self._fail(self._attempts[seq.handle], error_after(died, seq), cache=False)
        if not died.sound:
            raise StepFailed("the engine's state isn't sound after a failed step") from died.error

    # --- ends

    def _finish(self, attempt: DecodeAttempt, reason: FinishReason) -> None:
        self._send(attempt, finished(attempt, reason))
        self._drop(attempt)

    def _fail(self, attempt: DecodeAttempt, error: PdserveError, *, cache: bool = True) -> None:
        """End it by an error of this side: the router is told, and P if it had a part in it."""
        self._replies.fail(attempt.session_id, attempt.handle, error)
        self._end(attempt, error, cache=cache)

    def _end(self, attempt: DecodeAttempt, error: PdserveError, *, cache: bool = True) -> None:
        """End it without a word to the router."""
        grant = self._grants.of(attempt)
        if grant is not None:
            self._grants.end(grant, error)
        self._drop(attempt, cache=cache)

    def _drop(self, attempt: DecodeAttempt, *, cache: bool = True) -> None:
        """Forget it. A lease that is still open has its grant, which remembers the blocks."""
        self._admission.remove(attempt)
        if attempt.state is DecodeState.ACTIVE:
            self._engine.end(attempt.seq, cache=cache)
        attempt.move(DecodeState.ENDED, self._clock.now_s())
        del self._attempts[attempt.handle]

    def _expire(self, handle: int) -> None:
        attempt = self._attempts.get(handle)
        if attempt is not None:
            self._fail(attempt, DeadlineExceeded("the deadline has passed", phase=attempt.phase.value))

    def _begin_drain(self, drain_s: float) -> None:
        self._drain.begin(self._clock.now_s() + drain_s)
        for attempt in self._admission.waiting():
            self._drop(attempt)
            error = Draining("the worker takes no new work")
            self._replies.refuse(attempt.session_id, attempt.handle, error)

    # --- what is said

    def _heartbeat(self, now_s: float) -> None:
        for attempt in self._attempts.values():
            self._say_progress(attempt)
            age_s = now_s - attempt.moved_s
            if age_s >= _STUCK_S and not attempt.slow_logged and attempt.state is not DecodeState.ACTIVE:
                attempt.slow_logged = True
                log.warning(
                    "attempt.stuck", handle=attempt.handle, state=attempt.state.value,
                    peer=str(attempt.source), age_s=round(age_s, 3),
                )  # fmt: skip
        self._reporter.count(self._count())

    def _say_places(self) -> None:
        """Each waiting one hears its place where it is news; the first time it is the answer to StartDecode."""
        for attempt, place in self._admission.news_of_places():
            self._send(attempt, Waiting(attempt.handle, place))

    def _say_progress(self, attempt: DecodeAttempt) -> None:
        self._send(attempt, Progress(attempt.handle, attempt.phase, attempt.amount))

    def _send(self, attempt: DecodeAttempt, message: Up) -> None:
        self._replies.send(attempt.session_id, message)

    def _load(self) -> Load:
        engine = self._engine.load()
        return Load(
            blocks=self._engine.pool.counts(),
            num_running=engine.num_running + self._grants.num_live,
            num_waiting=engine.num_waiting + self._admission.num_waiting,
            num_queued_tokens=engine.num_queued_tokens,
            num_queued_short_tokens=engine.num_queued_short_tokens,
            chunk_tokens=self._engine.limits.chunk_tokens,
            num_cache_hit_tokens=engine.num_cache_hit_tokens + self._admission.num_hit_tokens,
            num_cache_query_tokens=engine.num_cache_query_tokens + self._admission.num_query_tokens,
            prefill_tokens_per_s=engine.prefill_tokens_per_s,
            step_s=engine.step_s,
            slowest_step_s=engine.slowest_step_s,
            draining=self._drain.has_begun,
        )

    def _count(self) -> CoreCounts:
        load = self._load()
        return CoreCounts(
            num_prefilled_tokens=self._num_prefilled_tokens,
            num_generated_tokens=self._num_generated_tokens,
            num_cache_query_tokens=load.num_cache_query_tokens,
            num_cache_hit_tokens=load.num_cache_hit_tokens,
            num_preemptions=self._num_preemptions,
            num_revocations=self._num_revocations,
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
