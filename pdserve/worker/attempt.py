"""One attempt in a worker's hands: what is the same in every role."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, TypeVar

from pdserve.engine.sequence import Sequence
from pdserve.errors import PdserveError
from pdserve.ids import AttemptName
from pdserve.messages import Phase
from pdserve.tracing import Attribute, SpanEvent, Trace

State = TypeVar("State", bound=Enum)

_MAX_MOMENTS = 256


@dataclass(slots=True, eq=False, kw_only=True)
class WorkerAttempt(Generic[State]):
    """Engine owner only. Times are the worker's clock.

    progress_s  when it came into its present state
    how         how it ended: a finish reason, an error's class; "" = it hasn't
    error       that ended it from this side; "" = none
    trace       the place of its spans; None = it isn't traced
    moments     of a traced one, what happened when: the first of num_moments
    """

    handle: int
    session_id: int
    seq: Sequence
    received_s: float
    progress_s: float
    state: State
    is_stuck_logged: bool = False
    how: str = ""
    error: str = ""
    trace: Trace | None = None
    moments: list[SpanEvent] = field(default_factory=list)
    num_moments: int = 0

    @property
    def name(self) -> AttemptName:
        """Whose it is, for logs."""
        return self.seq.name

    def note_end(self, how: str) -> None:
        """It ends, and so; what ends it afterwards doesn't count."""
        self.how = self.how or how

    def note_error(self, error: PdserveError) -> None:
        """It ends by an error of this side; as note_end."""
        if not self.how:
            self.how, self.error = type(error).__name__, f"{type(error).__name__}: {error}"

    def note_moment(self, name: str, at_s: float, **attributes: Attribute) -> None:
        """Something worth to be seen in its trace."""
        if self.trace is None:
            return
        self.num_moments += 1
        if len(self.moments) < _MAX_MOMENTS:
            self.moments.append(SpanEvent(name, at_s, attributes))

    def move(self, state: State, now_s: float) -> None:
        """Into the next state; from now on its age counts again."""
        self.state = state
        self.progress_s = now_s
        self.is_stuck_logged = False

    @property
    @abstractmethod
    def phase(self) -> Phase:
        """What Progress calls its state."""

    @property
    @abstractmethod
    def amount(self) -> int:
        """How far it is in its phase."""

    @property
    @abstractmethod
    def peer(self) -> str:
        """The other worker of the pair, for logs."""

    @property
    def is_ours(self) -> bool:
        """Whether it is this worker that must go on with it: then its deadline counts, and its progress is told."""
        return True

    @property
    def may_last(self) -> bool:
        """Whether its present state may last for any time."""
        return False
