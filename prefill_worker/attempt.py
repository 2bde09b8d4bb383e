"""One attempt at a prefill worker, from StartPrefill to the end of its lease."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from pdserve.messages import Phase
from pdserve.worker.attempt import WorkerAttempt
from prefill_worker.offering import OfferedLease


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


@dataclass(slots=True, eq=False, kw_only=True)
class PrefillAttempt(WorkerAttempt[PrefillState]):
    """Engine owner only. ends_here: its first token is its last, so its KV is offered to nobody."""

    lease: OfferedLease
    num_tokens: int
    ends_here: bool
    state: PrefillState = PrefillState.QUEUED
    begun_s: float = 0.0
    sampled_s: float | None = None
    holds_credit: bool = True

    @property
    def phase(self) -> Phase:
        return Phase.QUEUED if self.state is PrefillState.QUEUED else Phase.PREFILLING

    @property
    def amount(self) -> int:
        return self.seq.num_computed

    @property
    def peer(self) -> str:
        return str(self.lease.decode_worker)

    @property
    def is_ours(self) -> bool:
        return self.state in (PrefillState.QUEUED, PrefillState.PREFILLING)
