"""What the core of every role does alike: who its routers are, what is in hand, when it is due, what is told."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, Protocol, TypeVar

import structlog

from pdserve.block_messages import BlockCounts
from pdserve.books import BooksWrong
from pdserve.engine.block_pool import BlockState
from pdserve.engine.events import StepDied
from pdserve.engine.sequence import Sequence, SequenceState
from pdserve.errors import (
    DeadlineExceeded,
    Draining,
    InvariantViolated,
    PdserveError,
    RequestCancelled,
    RowFailed,
    StepFailed,
    WorkerLost,
    to_failure,
)
from pdserve.messages import (
    Abort,
    Failed,
    Load,
    Progress,
    Refused,
    StartDecode,
    StartPrefill,
    Up,
)
from pdserve.stuck import is_newly_stuck
from pdserve.tracing import Trace, TraceSpan
from pdserve.worker.attempt import WorkerAttempt
from pdserve.worker.messages import (
    BeginDrain,
    CoreCounts,
    Drained,
    FromSession,
    SessionClosed,
    SessionOpened,
    ToSession,
)
from pdserve.worker.reporter import Reporter
from pdserve.worker.role import CoreParts

log = structlog.get_logger()

_MAX_LOGGED = 16  # blocks

A = TypeVar("A", bound=WorkerAttempt[Any])
A_contra = TypeVar("A_contra", bound=WorkerAttempt[Any], contravariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleFigures:
    """What a role has beside its engine, for load reports: requests and prompt tokens that the engine doesn't know."""

    num_running: int = 0
    num_waiting: int = 0
    num_queued_tokens: int = 0
    num_queued_short_tokens: int = 0
    num_cache_hit_tokens: int = 0
    num_cache_query_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleBooks:
    """What a role's own books say, to be compared with the pool's. O(1) to make.

    num_granted, num_quarantined  blocks in leases that run, or that are over and may still be touched
    wrong  the role's own book that doesn't add up; "" = all do
    """

    num_granted: int = 0
    num_quarantined: int = 0
    wrong: str = ""


class RoleVerbs(Protocol[A_contra]):
    """What a role does itself; its desk calls it."""

    def start_attempt(self, start: StartPrefill | StartDecode, received: FromSession) -> None:
        """Accept or refuse one that nothing common to all roles forbids."""
        ...

    def end_attempt(self, attempt: A_contra, error: PdserveError) -> None:
        """Its router wants no answer."""
        ...

    def fail_attempt(self, attempt: A_contra, error: PdserveError, *, cache: bool = True) -> None:
        """End it by an error of this side, which its router is told."""
        ...

    def spans(self, attempt: A_contra, trace: Trace, end_s: float) -> list[TraceSpan]:
        """Of this worker's part in a traced one that is over."""
        ...

    def figures(self) -> RoleFigures: ...

    def books(self) -> RoleBooks: ...

    def held_blocks(self) -> Mapping[BlockState, Mapping[int, int | None]]:
        """All blocks that this role's books say are GRANTED, OWNED and QUARANTINED, and for which handle, if any."""
        ...


class Desk(Generic[A]):
    """Sessions, deadlines, drain, heartbeats and reports of one engine owner. Engine owner only.

    A drain: not begun → no new work → (at the limit: the rest is ended) → nothing left, said once.

    attempts  all that are in hand, by handle, oldest first
    num_…     totals that the core counts, for metrics
    """

    def __init__(self, parts: CoreParts, role: RoleVerbs[A], states: type[Enum]) -> None:
        """states: of the role's attempts."""
        self._states = states
        self._role = role
        self._engine = parts.engine
        self._clock = parts.clock
        self._to_loop = parts.to_loop
        self._tracer = parts.tracer
        self._books_are_wrong = False
        self._reporter = Reporter(
            parts.engine.pool, parts.meter, parts.to_loop, parts.clock, parts.config.timeouts.heartbeat_s
        )
        self.attempts: dict[int, A] = {}
        self._sessions: dict[int, None] = {}
        self._deadlines: list[tuple[float, int]] = []  # a heap; an ended attempt's entry is dropped when due
        self._drain_until_s: float | None = None
        self._drain_limit_passed = False
        self._drained = False
        self._failures: dict[str, int] = {}
        self._ignored: dict[str, int] = {}
        self.num_generated_tokens = 0
        self.num_preemptions = 0
        self.num_revocations = 0

    @property
    def is_draining(self) -> bool:
        return self._drain_until_s is not None

    # --- messages of the loop

    def handle(self, message: object) -> None:
        """Take in what isn't the role's own."""
        match message:
            case FromSession():
                if message.session_id in self._sessions:
                    self._on_session_message(message)
                else:  # it ended while this was on its way
                    self._note_ignored(message.message)
            case SessionOpened(session_id):
                self._sessions[session_id] = None
            case SessionClosed(session_id):
                self._sessions.pop(session_id, None)
                for attempt in [each for each in self.attempts.values() if each.session_id == session_id]:
                    self._end(attempt, WorkerLost("the router's session has ended"))
            case BeginDrain(drain_s):
                until_s = self._clock.now_s() + drain_s
                if self._drain_until_s is None or until_s < self._drain_until_s:
                    self._drain_until_s = until_s
            case _:
                raise InvariantViolated("a message that this role doesn't take", kind=type(message).__name__)

    def _on_session_message(self, received: FromSession) -> None:
        match received.message:
            case StartPrefill() | StartDecode() as start:
                self._on_start(start, received)
            case Abort(handle):
                attempt = self.attempts.get(handle)
                if attempt is not None and attempt.session_id == received.session_id:
                    self._end(attempt, RequestCancelled("aborted by the router"))
            case other:
                raise InvariantViolated("not for the engine", kind=type(other).__name__)

    def _on_start(self, start: StartPrefill | StartDecode, received: FromSession) -> None:
        if start.handle in self.attempts:
            self.ignore("attempt.repeated", start)
        elif self.is_draining:
            self.refuse(received.session_id, start, Draining("the worker accepts no new work"))
        elif received.matcher is None and start.key.params.structure is not None:
            error = InvariantViolated("a structure without its matcher", handle=start.handle)
            self.refuse(received.session_id, start, error)
        else:
            self._role.start_attempt(start, received)

    def _end(self, attempt: A, error: PdserveError) -> None:
        attempt.note_end(type(error).__name__)
        self._role.end_attempt(attempt, error)

    def received_s(self, received: FromSession) -> float:
        return self._clock.now_s() if received.received_s is None else received.received_s

    def sequence(
        self, start: StartPrefill | StartDecode, received: FromSession, *, takes_hits: bool
    ) -> Sequence:
        """What the engine will compute for it."""
        return Sequence(
            handle=start.handle,
            session_id=received.session_id,
            ids=list(start.token_ids),
            num_prompt_tokens=start.num_prompt_tokens,
            key=start.key,
            matcher=received.matcher,
            cache_salt=start.cache_salt,
            name=start.name,
            num_strikes=start.num_strikes,
            takes_hits=takes_hits,
        )

    def take_in(self, attempt: A, start: StartPrefill | StartDecode) -> None:
        """It is in hand until the role lets go of it, and due at its client's deadline."""
        self.attempts[attempt.handle] = attempt
        attempt.trace = self._tracer.join(start.name.traceparent)
        log.debug(
            "attempt.begun", handle=attempt.handle, **attempt.name.logged, peer=attempt.peer,
            num_tokens=len(start.token_ids),
        )  # fmt: skip
        heapq.heappush(self._deadlines, (attempt.received_s + start.deadline_left_s, attempt.handle))

    def let_go(self, attempt: A) -> None:
        """It is over, and nothing of it is left."""
        del self.attempts[attempt.handle]
        if attempt.trace is not None:
            self._tracer.put(self._role.spans(attempt, attempt.trace, self._clock.now_s()))
        log.debug(
            "attempt.ended", handle=attempt.handle, **attempt.name.logged, how=attempt.how,
            took_s=round(self._clock.now_s() - attempt.received_s, 4),
        )  # fmt: skip

    # --- a turn

    def begin_turn(self) -> bool:
        """End what is due. True once a heartbeat, after all that are in hand have been told of."""
        now_s = self._clock.now_s()
        while self._deadlines and self._deadlines[0][0] <= now_s:
            attempt = self.attempts.get(heapq.heappop(self._deadlines)[1])
            if attempt is not None and attempt.is_ours:
                error = DeadlineExceeded("the deadline has passed", phase=attempt.phase.value)
                self._role.fail_attempt(attempt, error)
        if (due_s := self._drain_due_s) is not None and due_s <= now_s:
            self._drain_limit_passed = True
            for attempt in list(self.attempts.values()):
                self._role.fail_attempt(attempt, Draining("the worker is draining"))
        if not self._reporter.heartbeat_due():
            return False
        self._heartbeat(now_s)
        return True

    def end_turn(self, *, num_left: int) -> float:
        """Report what has changed; returns the seconds until the next turn is due.

        num_left  what must be over before the worker has drained
        """
        if not self._books_are_wrong:
            self._check_books(is_idle=num_left == 0)
        if self.is_draining and num_left == 0 and not self._drained:
            self._drained = True
            self._to_loop(Drained())
        has_work = self._engine.has_work
        self._reporter.end_turn(has_work=has_work, load=self._load())
        if has_work:
            return 0.0
        now_s = self._clock.now_s()
        moments = [self._deadlines[0][0]] if self._deadlines else []
        if (due_s := self._drain_due_s) is not None:
            moments.append(due_s)
        return min([self._reporter.wait_s(), *(max(moment - now_s, 0.001) for moment in moments)])

    # --- books

    def _check_books(self, *, is_idle: bool) -> None:
        """O(1)."""
        pool, books = self._engine.pool, self._role.books()
        counts = pool.counts()
        wrong = books.wrong
        if not pool.adds_up():
            wrong = "blocks"
        elif (counts.granted, counts.quarantined) != (books.num_granted, books.num_quarantined):
            wrong = "grants"
        elif is_idle and counts.owned:
            wrong = "idle"
        if wrong:
            self._on_wrong_books(wrong, counts, books)

    def _on_wrong_books(self, book: str, counts: BlockCounts, books: RoleBooks) -> None:
        """Quarantine what is in doubt, end who has it, and have the loop drain: what is sound is finished."""
        self._books_are_wrong = True
        held = self._role.held_blocks()
        condemned = self._engine.pool.condemn(held)
        self._to_loop(
            BooksWrong(
                book,
                {
                    "counts": str(counts),
                    "role_says": str(books),
                    "num_condemned": len(condemned),
                    "condemned": condemned[:_MAX_LOGGED],
                },
            )
        )
        struck = {blocks.get(block_id) for blocks in held.values() for block_id in condemned}
        for attempt in [each for each in self.attempts.values() if each.handle in struck]:
            error = WorkerLost("its blocks are in doubt: the books of the worker don't add up")
            self._role.fail_attempt(attempt, error, cache=False)

    @property
    def _drain_due_s(self) -> float | None:
        """When the rest is to be ended, until that has been asked for."""
        return None if self._drain_limit_passed else self._drain_until_s

    def _heartbeat(self, now_s: float) -> None:
        for attempt in self.attempts.values():
            if attempt.is_ours:
                self.say_progress(attempt)
            if not attempt.may_last and is_newly_stuck(attempt, now_s):
                log.warning(
                    "attempt.stuck", handle=attempt.handle, **attempt.name.logged, state=attempt.state.value,
                    peer=attempt.peer, age_s=round(now_s - attempt.progress_s, 3),
                )  # fmt: skip
        self._reporter.count(self._counts())

    # --- answers

    def send(self, session_id: int, message: Up) -> None:
        """To one router; nothing if its session has ended."""
        if session_id in self._sessions:
            self._to_loop(ToSession(session_id, message))

    def say_progress(self, attempt: A) -> None:
        self.send(attempt.session_id, Progress(attempt.handle, attempt.phase, attempt.amount))

    def say_failed(self, attempt: A, error: PdserveError) -> None:
        """An attempt that had begun ended by an error."""
        attempt.note_error(error)
        self._note(error)
        self.send(attempt.session_id, Failed(attempt.handle, to_failure(error)))

    def refuse(self, session_id: int, work: StartPrefill | StartDecode | A, error: PdserveError) -> None:
        """An attempt will never begin."""
        self._note(error)
        log.info(
            "attempt.refused",
            handle=work.handle,
            **work.name.logged,
            error=type(error).__name__,
            reason=str(error),
        )
        self.send(session_id, Refused(work.handle, to_failure(error)))

    def ignore(self, event: str, start: StartPrefill | StartDecode) -> None:
        """Something that a correct router doesn't send: counted, logged, not acted on."""
        self._note_ignored(start)
        log.warning(event, handle=start.handle, **start.name.logged)

    def _note_ignored(self, message: object) -> None:
        kind = type(message).__name__
        self._ignored[kind] = self._ignored.get(kind, 0) + 1

    def _note(self, error: PdserveError) -> None:
        name = type(error).__name__
        self._failures[name] = self._failures.get(name, 0) + 1

    # --- a failed step

    def step_died(self, died: StepDied) -> None:
        """Fail all that were in it. Raises StepFailed if the engine can't go on.

        StepFailed is replayed by the router with one strike more; at the second strike, alone in its batch, the
        sequence itself is the cause and is never replayed.
        """
        for seq in died.seqs:
            twice = RowFailed("its step failed twice", cause=str(died.error))
            error = died.error if seq.num_strikes == 0 else twice
            self._role.fail_attempt(self.attempts[seq.handle], error, cache=False)
        if not died.sound:
            raise StepFailed("the engine's state isn't sound after a failed step") from died.error

    # --- reports

    def _load(self) -> Load:
        engine, own = self._engine.load(), self._role.figures()
        return Load(
            blocks=self._engine.pool.counts(),
            num_running=engine.num_running + own.num_running,
            num_waiting=engine.num_waiting + own.num_waiting,
            num_queued_tokens=engine.num_queued_tokens + own.num_queued_tokens,
            num_queued_short_tokens=engine.num_queued_short_tokens + own.num_queued_short_tokens,
            chunk_tokens=self._engine.limits.chunk_tokens,
            num_cache_hit_tokens=engine.num_cache_hit_tokens + own.num_cache_hit_tokens,
            num_cache_query_tokens=engine.num_cache_query_tokens + own.num_cache_query_tokens,
            prefill_tokens_per_s=engine.prefill_tokens_per_s,
            step_s=engine.step_s,
            slowest_step_s=engine.slowest_step_s,
            draining=self.is_draining,
        )

    def _num_by_state(self, states: type[Enum], those: Iterable[Enum]) -> tuple[tuple[str, int], ...]:
        """Of each state, 0 included."""
        found = Counter(those)
        return tuple((state.value, found[state]) for state in states)

    def _counts(self) -> CoreCounts:
        load, engine = self._load(), self._engine
        return CoreCounts(
            num_prefilled_tokens=engine.num_prefilled_tokens,
            num_aborted_prefill_tokens=engine.num_aborted_prefill_tokens,
            num_generated_tokens=self.num_generated_tokens,
            num_cache_query_tokens=load.num_cache_query_tokens,
            num_cache_hit_tokens=load.num_cache_hit_tokens,
            num_preemptions=self.num_preemptions,
            num_revocations=self.num_revocations,
            ignored=tuple(self._ignored.items()),
            attempt_states=self._num_by_state(self._states, (each.state for each in self.attempts.values())),
            sequence_states=self._num_by_state(SequenceState, (each.state for each in engine.sequences)),
            quarantine_age_s=round(engine.pool.quarantine_age_s, 1),
            failures=tuple(self._failures.items()),
            num_masks=engine.num_masks,
            mask_s=engine.mask_s,
            prefill_energy_j=engine.energy.prefill_j,
            decode_energy_j=engine.energy.decode_j,
        )
