"""What the attempts of one choice have cost so far, and whether there may be another one."""

from __future__ import annotations

from dataclasses import dataclass, field

from pdserve.errors import PdserveError, RowFailed, StepFailed
from pdserve.ids import WorkerRef
from router.attempt import Attempt, Outcome

MAX_STRIKES = 2  # a request whose steps failed so often is never run again


@dataclass(slots=True, kw_only=True)
class RetryBudget:
    """num_faults counts attempts that ended by a fault; refusals, revocations, drains and hand-backs don't count.

    begun    some worker has begun on it: whatever follows is a replay
    kept_on  the prefill worker of the last attempt, and how many tokens it had computed: it keeps them for a while
    """

    max_attempts: int
    begun: bool = False
    num_faults: int = 0
    num_strikes: int = 0
    first_start_s: float | None = None
    avoid: dict[tuple[str, str], int] = field(default_factory=dict)
    kept_on: tuple[WorkerRef, int] | None = None

    @property
    def num_attempts(self) -> int:
        """As users count them: the last one, and those before it that ended by a fault."""
        return self.num_faults + 1

    def judge(self, attempt: Attempt, outcome: Outcome) -> None:
        """Take in how an attempt ended by an error. Raises that error if it is for good."""
        error = outcome.error
        assert error is not None, "only a failed attempt is judged"
        if outcome.refused_by is None:
            self.begun = True
        if isinstance(error, StepFailed):
            self.num_strikes += 1
            if self.num_strikes >= MAX_STRIKES:
                raise RowFailed(
                    "engine steps with this request failed", strikes=self.num_strikes, last=str(error)
                )
        if not error.replayable:
            raise error
        if error.counts_as_attempt and outcome.refused_by is None:
            self._count_fault(attempt, error)

    def _count_fault(self, attempt: Attempt, error: PdserveError) -> None:
        self.num_faults += 1
        pair = ("" if attempt.prefill is None else attempt.prefill.id, attempt.decode.id)
        self.avoid[pair] = self.avoid.get(pair, 0) + 1
        if self.num_faults >= self.max_attempts:
            error.fields["attempts"] = self.num_faults
            raise error
