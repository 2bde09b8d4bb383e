"""Starts with a structure wait in front of the engine for their matchers, and only they."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from pdserve.children.prover import prove_inline
from pdserve.errors import Draining
from pdserve.grammar.matcher import CompiledStructure
from pdserve.ids import Epoch, WorkerRef
from pdserve.messages import (
    Refused,
    StartDecode,
    StartPrefill,
    Up,
)
from pdserve.sampling import SampleKey, SamplingParams
from pdserve.structure import Structure
from pdserve.token_mask import ids_of
from pdserve.tokenizer import Tokenizer
from pdserve.worker.messages import FromSession
from pdserve.worker.start_gate import StartGate
from pdserve.worker.structures import WorkerStructures
from tests.simulation.loop_driver import at_once
from tests.support.virtual_clock import VirtualClock

T = TypeVar("T")
EOS = 256
FILES = Tokenizer.fake().files
CHOICES = Structure.choices(["abc", "abd"])


class Later:
    """A Background whose work is done when the test says so."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], None]] = []

    def __call__(self, call: Callable[[], T], done: Callable[[T], None], /) -> None:
        self.waiting.append(lambda: done(call()))

    def work(self) -> None:
        while self.waiting:
            self.waiting.pop(0)()


class Bench:
    """A gate; what it forwards and what it answers."""

    def __init__(self, structures: WorkerStructures | None = None) -> None:
        self.background = Later()
        self.forwarded: list[FromSession] = []
        self.answers: list[tuple[int, Up]] = []
        self.bugs: list[Exception] = []
        self.is_forwarding_broken = False
        self.gate = StartGate(
            structures or WorkerStructures(FILES, VirtualClock()),
            prove_inline,
            self.background,
            self._forward,
            self._answer,
            self.bugs.append,
        )

    def _forward(self, message: object) -> None:
        assert isinstance(message, FromSession)
        if self.is_forwarding_broken:
            raise RuntimeError("a bug")
        self.forwarded.append(message)

    def _answer(self, session_id: int, message: Up) -> None:
        self.answers.append((session_id, message))

    def take(self, start: StartPrefill | StartDecode, session_id: int = 1) -> FromSession:
        received = FromSession(session_id, start, 5.0)
        self.gate.take(received, start)
        return received


def start_decode(handle: int, structure: Structure | None, *generated: int) -> StartDecode:
    params = SamplingParams(structure=structure, stop_token_ids=(7,))
    return StartDecode(
        handle=handle,
        token_ids=(1, 2, 3, *generated),
        num_prompt_tokens=3,
        key=SampleKey(params=params, seed=1, choice=0, eos_token_ids=(EOS,), max_tokens=9),
        deadline_left_s=9.0,
        num_strikes=0,
        source=WorkerRef("p0", Epoch(1, 1)),
    )


def test_a_start_without_a_structure_goes_through() -> None:
    bench = Bench()
    received = bench.take(start_decode(1, None))
    assert bench.forwarded == [received] and not bench.background.waiting


def test_a_start_with_one_comes_through_with_its_matcher_behind_what_was_generated() -> None:
    bench = Bench()
    bench.take(start_decode(1, CHOICES, *b"ab"))
    other = bench.take(start_decode(2, None))
    assert bench.forwarded == [other]
    bench.background.work()
    _, late = bench.forwarded
    assert (late.session_id, late.received_s) == (1, 5.0)
    assert late.matcher is not None
    assert ids_of(late.matcher.mask()) == list(b"cd")
    ending = Bench()
    ending.take(start_decode(1, Structure.regex("ab*"), *b"ab"))
    ending.background.work()
    (found,) = ending.forwarded
    assert found.matcher is not None
    assert ids_of(found.matcher.mask()) == [7, ord("b"), EOS]


def test_what_can_not_be_compiled_or_followed_is_refused() -> None:
    bench = Bench()
    bench.take(start_decode(1, Structure.regex("a(b")))
    bench.take(start_decode(2, CHOICES, *b"ax"), session_id=4)
    bench.background.work()
    assert not bench.forwarded
    (first_session, first), (second_session, second) = bench.answers
    assert isinstance(first, Refused) and isinstance(second, Refused)
    assert (first_session, first.handle, first.failure.error) == (1, 1, "InvalidRequest")
    assert (second_session, second.handle, second.failure.error) == (4, 2, "RowFailed")


class Broken(WorkerStructures):
    def _compiled(self, structure: Structure, num_bytes: int) -> CompiledStructure:
        raise RuntimeError("a bug of the grammar library")


def test_a_bug_in_making_a_matcher_ends_that_request_and_is_counted() -> None:
    bench = Bench(Broken(FILES, VirtualClock()))
    bench.take(start_decode(1, CHOICES))
    other = bench.take(start_decode(2, None))
    bench.background.work()
    ((_, answer),) = bench.answers
    assert isinstance(answer, Refused) and answer.failure.error == "InvariantViolated"
    assert bench.gate.num_failed == {"InvariantViolated": 1}
    assert bench.forwarded == [other] and not bench.bugs


def test_a_bug_in_passing_a_matcher_on_ends_the_worker() -> None:
    """asyncio would log it and go on: the attempt would stay here for ever."""
    bench = Bench()
    bench.take(start_decode(1, CHOICES))
    bench.is_forwarding_broken = True
    bench.background.work()
    (bug,) = bench.bugs
    assert isinstance(bug, RuntimeError)


def test_a_worker_without_a_tokenizer_says_so() -> None:
    answers: list[Up] = []
    gate = StartGate(
        WorkerStructures({}, VirtualClock()),
        prove_inline,
        at_once,
        lambda message: None,
        lambda session_id, message: answers.append(message),
        lambda bug: None,
    )
    start = start_decode(1, CHOICES)
    gate.take(FromSession(1, start, 0.0), start)
    (answer,) = answers
    assert isinstance(answer, Refused) and answer.failure.error == "UnknownModel"


def test_what_is_aborted_meanwhile_never_reaches_the_engine() -> None:
    bench = Bench()
    bench.take(start_decode(1, CHOICES), session_id=1)
    bench.take(start_decode(2, CHOICES), session_id=1)
    bench.take(start_decode(3, CHOICES), session_id=2)
    bench.gate.drop(1, 1)
    bench.gate.drop(1, 9)
    bench.gate.close(2)
    bench.background.work()
    assert [each.message.handle for each in bench.forwarded if isinstance(each.message, StartDecode)] == [2]
    assert not bench.answers


def test_a_drain_refuses_what_waits() -> None:
    bench = Bench()
    bench.take(start_decode(1, CHOICES))
    bench.gate.refuse_all(Draining("the worker accepts no new work"))
    bench.background.work()
    assert not bench.forwarded
    ((_, answer),) = bench.answers
    assert isinstance(answer, Refused) and answer.failure.error == "Draining"
