"""One attempt in a worker's hands: what is the same in every role."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

from pdserve.engine.sequence import Sequence
from pdserve.ids import AttemptName
from pdserve.messages import Phase

State = TypeVar("State", bound=Enum)


@dataclass(slots=True, eq=False, kw_only=True)
class WorkerAttempt(Generic[State]):
    """Engine owner only. Times are the worker's clock.

    progress_s  when it came into its present state
    how         how it ended: a finish reason, an error's class; "" = it hasn't
    """

    handle: int
    session_id: int
    seq: Sequence
    received_s: float
    progress_s: float
    state: State
    is_stuck_logged: bool = False
    how: str = ""

    @property
    def name(self) -> AttemptName:
        """Whose it is, for logs."""
        return self.seq.name

    def note_end(self, how: str) -> None:
        """It ends, and so; what ends it afterwards doesn't count."""
        self.how = self.how or how

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
