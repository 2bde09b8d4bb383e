"""The decode worker's engine owner: grants, waiting list, intake of handed-off KV, continuous batching, tokens.

    StartDecode ─► waiting ─► granted ─► pulled ─► HandedOff ─► runs ─► SequenceFinished
                      │          └── ended by anyone    ─► Retired ─► blocks free
                      └── without a source: prefilled here ─► runs

The role `both` is this core over an engine without a bound on prefill tokens in a step. A synchronous class: a driver
calls `handle` and `step` on the engine thread. Every grant is answered exactly once, with DecodeStarted or Failed,
unless its router asked for the end or is gone.
"""

from __future__ import annotations

from collections.abc import Mapping

import structlog

from decode_worker.answers import finished, started_by_hand_off, started_here, step_tokens
from decode_worker.attempt import DecodeAttempt, DecodeState
from decode_worker.grant_queue import GrantQueue
from decode_worker.grants import Grant, Grants
from decode_worker.spans import spans_of
from kv_transfer.messages import HandedOff, LeaseReleased, PullProgress, Retired
from pdserve.engine.block_pool import BlockState
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
from pdserve.errors import (
    Draining,
    HandedBack,
    InvalidRequest,
    Overloaded,
    PdserveError,
    Revoked,
    RowFailed,
)
from pdserve.messages import (
    Demand,
    PromptLogprobs,
    StartDecode,
    StartPrefill,
    Step,
    StepTokens,
    Up,
    Waiting,
)
from pdserve.sampling import FinishReason
from pdserve.token_matcher import finish_by
from pdserve.tracing import Attribute, Trace, TraceSpan
from pdserve.worker.desk import Desk, RoleBooks, RoleFigures
from pdserve.worker.messages import (
    BeginDrain,
    FromSession,
    LinkChanged,
)
from pdserve.worker.role import CoreParts

log = structlog.get_logger()

_RETRY_AFTER_S = 1.0


class DecodeCore:
    """Owner of the engine in the roles decode and both."""

    def __init__(self, parts: CoreParts) -> None:
        engine = parts.engine
        self._engine = engine
        self._meter = parts.meter
        self._clock = parts.clock
        self._desk: Desk[DecodeAttempt] = Desk(parts, self, DecodeState)
        self._grants = Grants(engine, parts.to_transfer, parts.random)
        self._queue = GrantQueue(engine, self._grants, parts.config.worker.max_waiting)
        self._attempts = self._desk.attempts
        self._num_accepted = 0

    # --- Owner

    def handle(self, message: object) -> None:
        match message:
            case PullProgress():
                self._grants.note_progress(message)
            case HandedOff():
                self._on_handed_off(message)
            case Retired():
                self._on_retired(message)
            case LeaseReleased(lease_id):
                self._grants.release_quarantined(lease_id)
            case BeginDrain():
                self._desk.handle(message)
                self._refuse_waiting()
            case LinkChanged():
                pass  # what a lost link means for a grant comes as Retired
            case FromSession(message=Demand()):
                pass  # credits are a prefill worker's
            case _:
                self._desk.handle(message)

    @property
    def attempts(self) -> tuple[DecodeAttempt, ...]:
        """All that are in hand, oldest first; for tests and simulations."""
        return tuple(self._attempts.values())

    def step(self) -> float | None:
        self._desk.begin_turn()
        while (grant := self._queue.revocable_ahead()) is not None:
            self._revoke(grant)
        if self._engine.has_work:
            self._take_events(self._engine.step())
        self._grant_waiting(self._clock.now_s())
        return self._desk.end_turn(num_left=len(self._attempts) + len(self._grants))

    # --- starts

    def start_attempt(self, start: StartPrefill | StartDecode, received: FromSession) -> None:
        session_id = received.session_id
        if isinstance(start, StartPrefill):
            role = InvalidRequest("this worker doesn't prefill for other workers")
            self._desk.refuse(session_id, start, role)
            return
        error = self._why_not(start)
        if error is not None:
            self._desk.refuse(session_id, start, error)
            return
        now_s = self._clock.now_s()
        attempt = self._new_attempt(start, received)
        self._desk.take_in(attempt, start)
        self._queue.add(attempt)
        self._grant_waiting(now_s)
        if attempt.state is DecodeState.WAITING and self._queue.is_over_bound:
            self._drop(attempt)
            num_waiting = self._queue.num_waiting
            full = Overloaded("the waiting list is full", retry_after_s=_RETRY_AFTER_S, waiting=num_waiting)
            self._desk.refuse(session_id, start, full)
        self._say_places()

    def _why_not(self, start: StartDecode) -> InvalidRequest | None:
        """What forbids to ever start it here."""
        num_final = start.num_prompt_tokens + start.key.max_tokens
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
        return None

    def _new_attempt(self, start: StartDecode, received: FromSession) -> DecodeAttempt:
        received_s = self._desk.received_s(received)
        # Prefilled here, prompt logprobs need the logits of every position, which a hit hasn't.
        takes_hits = start.source is not None or start.key.params.prompt_logprobs is None
        self._num_accepted += 1
        return DecodeAttempt(
            handle=start.handle,
            session_id=received.session_id,
            seq=self._desk.sequence(start, received, takes_hits=takes_hits),
            received_s=received_s,
            progress_s=received_s,
            source=start.source,
            priority=start.priority,
            since_s=received_s - start.age_s,
            serial=self._num_accepted,
            ends_there=start.source is not None
            and start.key.next_is_last(len(start.token_ids), start.num_prompt_tokens),
        )

    # --- grants

    def _grant_waiting(self, now_s: float) -> None:
        granted = self._queue.grant(now_s)
        for attempt, answer in granted:
            self._send(attempt, answer)
        if granted:
            self._say_places()

    def _revoke(self, grant: Grant) -> None:
        """Take a grant back for older sequences."""
        self._desk.num_revocations += 1
        log.info(
            "grant.revoked", handle=grant.attempt.handle, lease=grant.lease_id, **grant.attempt.name.logged
        )
        error = Revoked("the grant was taken back for older sequences", lease_id=grant.lease_id)
        self.fail_attempt(grant.attempt, error)

    def _on_handed_off(self, handed_off: HandedOff) -> None:
        grant = self._grants.adopt(handed_off.lease_id)
        if grant is None:
            return  # ended by this side meanwhile; answered already
        attempt, seq = grant.attempt, grant.attempt.seq
        attempt.handed_off = handed_off
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
            self.fail_attempt(attempt, error)
            return
        self._send(attempt, started_by_hand_off(attempt, handed_off))
        if reason is not None:  # the prefill worker should have called it final
            self._finish(attempt, reason)

    def _on_retired(self, retired: Retired) -> None:
        grant = self._grants.retire(retired)
        if not grant.ended:
            log.info(
                "lease.lost", lease=grant.lease_id, handle=grant.attempt.handle, **grant.attempt.name.logged,
                peer=str(grant.source), quarantine=retired.quarantine,
                error=type(retired.error).__name__, reason=str(retired.error),
            )  # fmt: skip
            self.fail_attempt(grant.attempt, retired.error)

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
                case ChunkDone(seq, num_computed):
                    self._note(seq.handle, "chunk", **{"pdserve.computed_tokens": num_computed})
                case Preempted(seq):
                    self._desk.num_preemptions += 1
                    self._note(seq.handle, "preempted")
                case RowDied() | StepDied() | HandedBackSeq():
                    ends.append(event)
        for session_id, of_session in tokens.items():
            self._desk.send(session_id, Step(tuple(of_session)))
        for event in ends:
            self._take_end(event)

    def _note(self, handle: int, moment: str, **attributes: Attribute) -> None:
        """Something happened to an attempt that its router is told of."""
        attempt = self._attempts[handle]
        if attempt.trace is not None:
            attempt.note_moment(moment, self._clock.now_s(), **attributes)
        self._desk.say_progress(attempt)

    def _take_token(
        self, attempt: DecodeAttempt, sampled: Sampled, tokens: dict[int, list[StepTokens]]
    ) -> None:
        self._desk.num_generated_tokens += 1
        if sampled.first:
            attempt.started_s = self._clock.now_s()
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
                self.fail_attempt(self._attempts[seq.handle], error, cache=False)
            case HandedBackSeq(seq):
                handed_back = HandedBack("too long to be recomputed here", tokens=len(seq.ids))
                self.fail_attempt(self._attempts[seq.handle], handed_back)
            case StepDied():
                self._desk.step_died(event)

    # --- ends

    def _finish(self, attempt: DecodeAttempt, reason: FinishReason) -> None:
        attempt.note_end(reason.value)
        self._send(attempt, finished(attempt, reason))
        self._drop(attempt)

    def fail_attempt(self, attempt: DecodeAttempt, error: PdserveError, *, cache: bool = True) -> None:
        """The prefill worker is told, too, if it had a part in it."""
        self._desk.say_failed(attempt, error)
        self.end_attempt(attempt, error, cache=cache)

    def end_attempt(self, attempt: DecodeAttempt, error: PdserveError, *, cache: bool = True) -> None:
        grant = self._grants.of(attempt)
        if grant is not None:
            self._grants.end(grant, error)
        self._drop(attempt, cache=cache)

    def _drop(self, attempt: DecodeAttempt, *, cache: bool = True) -> None:
        """Forget it. A lease that is still open has its grant, which remembers the blocks."""
        self._queue.remove(attempt)
        if attempt.state is DecodeState.ACTIVE:
            self._engine.end(attempt.seq, cache=cache)
        attempt.move(DecodeState.ENDED, self._clock.now_s())
        attempt.note_end("refused")
        self._desk.let_go(attempt)

    def _refuse_waiting(self) -> None:
        for attempt in self._queue.waiting():
            self._drop(attempt)
            error = Draining("the worker accepts no new work")
            self._desk.refuse(attempt.session_id, attempt, error)

    # --- answers

    def _say_places(self) -> None:
        """Each waiting one hears its place where it is news; the first time it is the answer to StartDecode."""
        for attempt, place in self._queue.news_of_places():
            self._send(attempt, Waiting(attempt.handle, place))

    def _send(self, attempt: DecodeAttempt, message: Up) -> None:
        self._desk.send(attempt.session_id, message)

    def spans(self, attempt: DecodeAttempt, trace: Trace, end_s: float) -> list[TraceSpan]:
        return spans_of(attempt, trace, end_s)

    def books(self) -> RoleBooks:
        grants = self._grants
        return RoleBooks(
            num_granted=grants.num_granted_blocks,
            num_quarantined=grants.num_quarantined_blocks + self._engine.pool.num_condemned,
        )

    def held_blocks(self) -> Mapping[BlockState, Mapping[int, int | None]]:
        held = self._grants.held_blocks()
        for attempt in self._attempts.values():
            held[BlockState.OWNED] |= dict.fromkeys(attempt.seq.block_table, attempt.handle)
        return held

    def figures(self) -> RoleFigures:
        return RoleFigures(
            num_running=self._grants.num_live,
            num_waiting=self._queue.num_waiting,
            num_cache_hit_tokens=self._queue.num_hit_tokens,
            num_cache_query_tokens=self._queue.num_query_tokens,
        )
