"""What an attempt is given, what it tells the choice it belongs to, and how it can end."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from pdserve.errors import PdserveError
from pdserve.messages import Finished, FirstToken, Started
from pdserve.sampling import SampleKey
from router.member import Member
from router.timings import AttemptTimes


class AttemptPhase(Enum):
    """Where an attempt is, as far as the router knows."""

    GRANTING = "granting"
    WAITING = "waiting"
    QUEUED = "queued"
    PREFILLING = "prefilling"
    HANDOFF = "handoff"
    RUNNING = "running"
    PREEMPTED = "preempted"
    ENDED = "ended"


class AttemptFacts(Protocol):
    """What a choice may know of the attempt that its tokens come from."""

    @property
    def prefill(self) -> Member | None: ...
    @property
    def times(self) -> AttemptTimes: ...

    def end_by_text(self) -> None:
        """The choice ended by its text, which workers don't know: stop them."""
        ...


class Sink(Protocol):
    """The choice that the tokens belong to."""

    def on_tokens(self, attempt: AttemptFacts, token_ids: tuple[int, ...]) -> bool:
        """The next tokens, in order.

        returns  whether the choice has ended with them (or before them); what comes later is overrun
        """
        ...

    def on_first_token(self, attempt: AttemptFacts, message: FirstToken) -> None:
        """The prefill worker's figures, once per attempt, before its token or after it."""
        ...

    def on_started(self, attempt: AttemptFacts, message: Started) -> None:
        """D's verdict: the sequence runs there."""
        ...

    def on_finished(self, attempt: AttemptFacts, message: Finished) -> None:
        """The decode worker's figures at the end."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What an attempt computes: prompt and tokens so far, under the request's key.

    age_s  since the first StartDecode of this choice
    """

    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    key: SampleKey
    num_strikes: int
    priority: int
    age_s: float
    cache_salt: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an attempt ended: error None = the choice has ended; `refused_by`: nothing was begun."""

    error: PdserveError | None = None
    refused_by: Member | None = None
