"""What an attempt is given, what it tells the choice it belongs to, and how it can end."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from pdserve.errors import PdserveError
from pdserve.ids import AttemptName, WorkerRef
from pdserve.messages import (
    DecodeStarted,
    FirstToken,
    Granted,
    SequenceFinished,
    StartDecode,
    StartPrefill,
)
from pdserve.sampling import SampleKey, TokenLogprobs
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


class AttemptListener(Protocol):
    """The choice that the tokens belong to."""

    def on_prompt_logprobs(self, tokens: tuple[TokenLogprobs, ...]) -> None:
        """All of them, from index 1 on, before the attempt's first tokens; once, if the order asked."""
        ...

    def on_tokens(
        self,
        attempt: AttemptFacts,
        token_ids: tuple[int, ...],
        logprobs: tuple[TokenLogprobs, ...],
        energy_j: float | None,
    ) -> bool:
        """The next tokens, in order.

        logprobs  one a token, if the order asked
        energy_j  of decoding in this attempt so far, if the worker can tell
        returns  whether the choice has ended with them (or before them); what comes later is overrun
        """
        ...

    def on_first_token(self, attempt: AttemptFacts, message: FirstToken) -> None:
        """The prefill worker's figures, once per attempt, before its token or after it."""
        ...

    def on_started(self, attempt: AttemptFacts, message: DecodeStarted) -> None:
        """D's verdict: the sequence runs there."""
        ...

    def on_finished(self, attempt: AttemptFacts, message: SequenceFinished) -> None:
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
    name: AttemptName

    def start_decode(self, handle: int, deadline_left_s: float, source: WorkerRef | None) -> StartDecode:
        """For the decode worker; source: the prefill worker, None = the decode worker prefills."""
        return StartDecode(
            handle=handle,
            token_ids=self.token_ids,
            num_prompt_tokens=self.num_prompt_tokens,
            key=self.key,
            deadline_left_s=deadline_left_s,
            num_strikes=self.num_strikes,
            source=source,
            priority=self.priority,
            age_s=self.age_s,
            cache_salt=self.cache_salt,
            name=self.name,
        )

    def start_prefill(
        self, granted: Granted, deadline_left_s: float, decode_worker: WorkerRef
    ) -> StartPrefill:
        """For the prefill worker, once the decode worker has granted."""
        return StartPrefill(
            handle=granted.handle,
            token_ids=self.token_ids,
            num_prompt_tokens=self.num_prompt_tokens,
            key=self.key,
            deadline_left_s=deadline_left_s,
            num_strikes=self.num_strikes,
            lease_id=granted.lease_id,
            decode_worker=decode_worker,
            num_skip_blocks=granted.num_cached_blocks,
            cache_salt=self.cache_salt,
            name=self.name,
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an attempt ended: error None = the choice has ended; `refused_by`: nothing was begun."""

    error: PdserveError | None = None
    refused_by: Member | None = None
