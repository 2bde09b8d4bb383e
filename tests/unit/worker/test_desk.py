"""What a desk does for the core of any role, here for one that writes down what it is asked."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

import pytest
from structlog.testing import capture_logs

from pdserve.engine.block_pool import BlockState
from pdserve.engine.engine import Engine
from pdserve.engine.events import StepDied
from pdserve.engine.fake_runner import FakeRunner
from pdserve.errors import (
    Draining,
    InvariantViolated,
    PdserveError,
    RequestCancelled,
    RowFailed,
    StepFailed,
    WorkerLost,
)
from pdserve.messages import (
    Abort,
    Credits,
    Failed,
    Load,
    Phase,
    Progress,
    Refused,
    Role,
    StartDecode,
    StartPrefill,
    Up,
)
from pdserve.sampling import SampleKey, SamplingParams
from pdserve.service.config import Config
from pdserve.structure import Structure, StructureKind
from pdserve.tracing import Trace, TraceSpan
from pdserve.worker.attempt import WorkerAttempt
from pdserve.worker.desk import Desk, RoleBooks, RoleFigures
from pdserve.worker.messages import (
    BeginDrain,
    CoreCounts,
    Drained,
    FromSession,
    SessionClosed,
    SessionOpened,
    ToAll,
    ToSession,
)
from pdserve.worker.metered_runner import MeteredRunner
from pdserve.worker.role import CoreParts, limits_of
from tests.support.virtual_clock import VirtualClock


class State(Enum):
    HERE = "here"
    ELSEWHERE = "elsewhere"
    LASTING = "lasting"


@dataclass(slots=True, eq=False, kw_only=True)
class PlainAttempt(WorkerAttempt[State]):
    @property
    def phase(self) -> Phase:
        return Phase.QUEUED

    @property
    def amount(self) -> int:
        return 3

    @property
    def peer(self) -> str:
        return "d0"

    @property
    def is_ours(self) -> bool:
        return self.state is not State.ELSEWHERE

    @property
    def may_last(self) -> bool:
        return self.state is State.LASTING


class Bench:
    """A desk with session 1 open, and its role."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.said: list[object] = []
        self.ends: list[tuple[int, str, str]] = []
        meter = MeteredRunner(FakeRunner(num_blocks=4), self.clock, lambda new_shape: None)
        config = Config()
        parts = CoreParts(
            engine=Engine(
                meter, limits_of(Role.PREFILL, config.engine, config.timeouts.prefill_progress_s), self.clock
            ),
            meter=meter,
            to_transfer=self.said.append,
            to_loop=self.said.append,
            clock=self.clock,
            random=random.Random(1),
            config=config,
        )
        self.desk: Desk[PlainAttempt] = Desk(parts, self, State)
        self.desk.handle(SessionOpened(1, "r1"))

    # --- RoleVerbs

    def start_attempt(self, start: StartPrefill | StartDecode, received: FromSession) -> None:
        at_s = self.desk.received_s(received)
        attempt = PlainAttempt(
            handle=start.handle,
            session_id=received.session_id,
            seq=self.desk.sequence(start, received, takes_hits=True),
            received_s=at_s,
            progress_s=at_s,
            state=State.HERE,
        )
        self.desk.take_in(attempt, start)

    def end_attempt(self, attempt: PlainAttempt, error: PdserveError) -> None:
        self._over(attempt, "ended", error)

    def fail_attempt(self, attempt: PlainAttempt, error: PdserveError, *, cache: bool = True) -> None:
        self.desk.say_failed(attempt, error)
        self._over(attempt, "failed" if cache else "failed, not cached", error)

    def spans(self, attempt: PlainAttempt, trace: Trace, end_s: float) -> list[TraceSpan]:
        return [trace.span("part", attempt.received_s, end_s, error=attempt.error)]

    def figures(self) -> RoleFigures:
        return RoleFigures(num_waiting=7)

    def books(self) -> RoleBooks:
        return RoleBooks()

    def held_blocks(self) -> Mapping[BlockState, Mapping[int, int | None]]:
        return {state: {} for state in BlockState}

    def _over(self, attempt: PlainAttempt, how: str, error: PdserveError) -> None:
        self.ends.append((attempt.handle, how, type(error).__name__))
        del self.desk.attempts[attempt.handle]

    # --- the test's hands

    def start(self, handle: int, *, session_id: int = 1, deadline_s: float = 60.0, strikes: int = 0) -> None:
        self.desk.handle(FromSession(session_id, start_of(handle, deadline_s=deadline_s, strikes=strikes)))

    def turn(self, after_s: float = 0.0) -> float:
        self.clock.advance(after_s)
        self.desk.begin_turn()
        return self.desk.end_turn(num_left=len(self.desk.attempts))

    def told(self, kind: type[Up]) -> list[Up]:
        messages = [each.message for each in self.said if isinstance(each, ToSession)]
        return [message for message in messages if isinstance(message, kind)]


def start_of(
    handle: int, *, deadline_s: float = 60.0, strikes: int = 0, structure: Structure | None = None
) -> StartDecode:
    params = SamplingParams(temperature=0.0, structure=structure)
    return StartDecode(
        handle=handle,
        token_ids=(1, 2, 3),
        num_prompt_tokens=3,
        key=SampleKey(params=params, seed=0, choice=0, eos_token_ids=(256,), max_tokens=4),
        deadline_left_s=deadline_s,
        num_strikes=strikes,
        source=None,
    )


def test_deadlines_end_what_this_worker_must_go_on_with_each_once() -> None:
    bench = Bench()
    for handle, deadline_s in ((1, 3.0), (2, 1.0), (3, 2.0), (4, 1.5)):
        bench.start(handle, deadline_s=deadline_s)
    bench.desk.attempts[4].move(State.ELSEWHERE, bench.clock.now_s())
    assert 0.0 < bench.turn() <= 0.5
    bench.turn(2.5)
    assert bench.ends == [(2, "failed", "DeadlineExceeded"), (3, "failed", "DeadlineExceeded")]
    bench.turn(10.0)
    assert [handle for handle, *_ in bench.ends] == [2, 3, 1] and list(bench.desk.attempts) == [4]


def test_the_time_since_the_loop_read_it_counts_against_the_deadline() -> None:
    bench = Bench()
    bench.clock.advance(5.0)
    bench.desk.handle(FromSession(1, start_of(1, deadline_s=2.0), received_s=bench.clock.now_s() - 1.0))
    bench.turn(0.9)
    assert bench.ends == []
    bench.turn(0.2)
    assert bench.ends == [(1, "failed", "DeadlineExceeded")]


def test_a_drain_refuses_what_is_new_ends_the_rest_at_its_limit_and_says_drained_once() -> None:
    bench = Bench()
    bench.start(1)
    bench.turn()
    assert not bench.desk.is_draining
    bench.desk.handle(BeginDrain(10.0))
    bench.desk.handle(BeginDrain(20.0))  # doesn't prolong it
    bench.start(2)
    (refused,) = bench.told(Refused)
    assert isinstance(refused, Refused) and refused.handle == 2 and refused.failure.error == "Draining"
    bench.turn(9.9)
    assert bench.ends == []
    bench.turn(0.2)
    assert bench.ends == [(1, "failed", "Draining")]
    bench.turn(20.0)
    assert bench.said.count(Drained()) == 1
    loads = [each.message for each in bench.said if isinstance(each, ToAll)]
    assert [load.draining for load in loads if isinstance(load, Load)][-1]


def test_the_end_of_a_session_ends_what_came_through_it_without_a_word() -> None:
    bench = Bench()
    bench.desk.handle(SessionOpened(2, "r2"))
    for handle, session_id in ((1, 1), (2, 2), (3, 1)):
        bench.start(handle, session_id=session_id)
    bench.desk.handle(SessionClosed(1))
    name = WorkerLost.__name__
    assert bench.ends == [(1, "ended", name), (3, "ended", name)] and list(bench.desk.attempts) == [2]
    bench.start(4, session_id=1)  # was on its way
    bench.desk.send(1, Credits(5))
    assert 4 not in bench.desk.attempts and bench.told(Credits) == []


def test_an_abort_ends_only_what_its_own_router_started() -> None:
    bench = Bench()
    bench.desk.handle(SessionOpened(2, "r2"))
    bench.start(1)
    bench.desk.handle(FromSession(2, Abort(1)))
    bench.desk.handle(FromSession(1, Abort(9)))
    assert bench.ends == []
    bench.desk.handle(FromSession(1, Abort(1)))
    assert bench.ends == [(1, "ended", RequestCancelled.__name__)]


def test_a_repeated_start_is_counted_and_ignored() -> None:
    bench = Bench()
    bench.start(1)
    first = bench.desk.attempts[1]
    with capture_logs() as logs:
        bench.start(1)
    assert bench.desk.attempts == {1: first} and [line["event"] for line in logs] == ["attempt.repeated"]
    bench.turn(1.0)
    assert [each.ignored for each in bench.said if isinstance(each, CoreCounts)] == [(("StartDecode", 1),)]


def test_a_structure_without_its_matcher_is_our_fault_and_refused() -> None:
    bench = Bench()
    structure = Structure(StructureKind.REGEX, ("a+",))
    bench.desk.handle(FromSession(1, start_of(1, structure=structure)))
    (refused,) = bench.told(Refused)
    assert isinstance(refused, Refused) and refused.failure.error == InvariantViolated.__name__


def test_a_heartbeat_tells_progress_of_what_is_ours_and_what_is_stuck_once_a_state() -> None:
    bench = Bench()
    for handle, state in ((1, State.HERE), (2, State.ELSEWHERE), (3, State.LASTING)):
        bench.start(handle)
        bench.desk.attempts[handle].move(state, bench.clock.now_s())
    with capture_logs() as logs:
        for _ in range(20):
            bench.turn(0.5)
        stuck = [
            (line["handle"], line["state"], line["peer"]) for line in logs if line["event"] == "attempt.stuck"
        ]
        assert stuck == [(1, "here", "d0"), (2, "elsewhere", "d0")]
        bench.desk.attempts[1].move(State.ELSEWHERE, bench.clock.now_s())
        for _ in range(10):
            bench.turn(0.5)
    assert [line["handle"] for line in logs if line["event"] == "attempt.stuck"] == [1, 2, 1]
    assert bench.told(Progress)[:2] == [Progress(1, Phase.QUEUED, 3), Progress(3, Phase.QUEUED, 3)]
    assert Progress(2, Phase.QUEUED, 3) not in bench.told(Progress)


def test_a_failed_step_gives_a_strike_and_the_second_one_is_the_sequences_own_fault() -> None:
    bench = Bench()
    bench.start(1)
    bench.start(2, strikes=1)
    seqs = tuple(attempt.seq for attempt in bench.desk.attempts.values())
    bench.desk.step_died(StepDied(seqs, StepFailed("broken"), sound=True))
    how = "failed, not cached"
    assert bench.ends == [(1, how, StepFailed.__name__), (2, how, RowFailed.__name__)]
    assert [type(each) for each in bench.told(Failed)] == [Failed, Failed]
    with pytest.raises(StepFailed, match="isn't sound"):
        bench.desk.step_died(StepDied((), StepFailed("broken"), sound=False))


def test_refused_and_failed_ones_are_counted_by_error() -> None:
    bench = Bench()
    bench.start(1)
    bench.desk.refuse(1, start_of(8), Draining("no"))
    bench.desk.say_failed(bench.desk.attempts[1], Draining("no"))
    bench.turn(0.6)
    (counts,) = (each for each in bench.said if isinstance(each, CoreCounts))
    assert counts.failures == (("Draining", 2),)
