"""When a child that ended is started again, and when not. Pure: one `Restarts` a child."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """How patient the supervisor is.

    stable_s           a child that was ready for so long starts afresh: its next end is its first again
    max_failed_starts  ends in a row of a child that was never ready: what has not worked once won't by itself
    final_exits        exit code → why starting it again would change nothing
    final_starts       the same of a child that was never ready: once it was, the reason may pass
    """

    first_delay_s: float = 0.2
    factor: float = 2.0
    max_delay_s: float = 30.0
    stable_s: float = 10.0
    max_failed_starts: int = 3
    final_exits: Mapping[int, str]
    final_starts: Mapping[int, str]

    def delay_s(self, num_in_a_row: int) -> float:
        """Delay before the start that follows the n-th end in a row, n from 1."""
        return float(min(self.max_delay_s, self.first_delay_s * self.factor ** (num_in_a_row - 1)))


@dataclass(frozen=True, slots=True)
class Again:
    """Start it again."""

    delay_s: float
    num_in_a_row: int


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Don't; the cluster can't be what was asked for."""

    reason: str


class Restarts:
    """The history of one child."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._num_in_a_row = 0
        self._ever_ready = False

    def after_exit(self, code: int, ready_s: float | None) -> Again | GiveUp:
        """What to do now.

        code     exit status; negative = killed by that signal
        ready_s  how long it had been ready; None = it never became ready this time
        """
        self._ever_ready = self._ever_ready or ready_s is not None
        final = (
            self._policy.final_exits
            if self._ever_ready
            else {**self._policy.final_exits, **self._policy.final_starts}
        )
        if code in final:
            return GiveUp(final[code])
        stable = ready_s is not None and ready_s >= self._policy.stable_s
        self._num_in_a_row = 1 if stable else self._num_in_a_row + 1
        if not self._ever_ready and self._num_in_a_row >= self._policy.max_failed_starts:
            return GiveUp(f"it never became ready in {self._num_in_a_row} starts")
        return Again(self._policy.delay_s(self._num_in_a_row), self._num_in_a_row)


def exit_text(code: int) -> str:
    """An exit status in words, to follow the name of a process."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
