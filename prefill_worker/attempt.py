"""One attempt at a prefill worker, from StartPrefill to the end of its lease."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from pdserve.engine.sequence import Sequence
from pdserve.messages import Phase
from prefill_worker.offering import Lease


class PrefillState(Enum):
    """QUEUED → PREFILLING → SAMPLED → (gone with its lease); any of them → ENDED → (gone with its lease).

    SAMPLED: FirstToken is said, CONFIRM is awaited. ENDED: answered for good, or nobody wants an answer; only the
    lease is still open. A final first token leads to ENDED, too: the router aborts the decode worker, which ends
    the lease.
    """

    QUEUED = "queued"
    PREFILLING = "prefilling"
    SAMPLED = "sampled"
    ENDED = "ended"


@dataclass(slots=True, eq=False)
class PrefillAttempt:
    """Engine owner only. Times are the worker's clock."""

    handle: int
    session_id: int
    seq: Sequence
    lease: Lease
    num_tokens: int
    received_s: float
    state: PrefillState = PrefillState.QUEUED
    since_s: float = 0.0
    begun_s: float = 0.0
    holds_credit: bool = True
    slow_logged: bool = False

    @property
    def phase(self) -> Phase:
        return Phase.QUEUED if self.state is PrefillState.QUEUED else Phase.PREFILLING

    def move(self, state: PrefillState, now_s: float) -> None:
        """Into the next state; from now on its age counts anew."""
        self.state = state
        self.since_s = now_s
        self.slow_logged = False
