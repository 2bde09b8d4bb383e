"""Requests that the decode worker has no blocks for yet: no memory held, bounded, by priority, then age."""

from __future__ import annotations

from decode_worker.attempt import DecodeAttempt

OVERTAKE_S = 1.0
"""Once the oldest has waited so long, nobody overtakes it."""


class WaitingList:
    """Engine owner only."""

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._attempts: dict[DecodeAttempt, None] = {}

    def __len__(self) -> int:
        return len(self._attempts)

    @property
    def is_over_bound(self) -> bool:
        """Whether more wait than may: the newest must be refused if it isn't granted at once."""
        return len(self._attempts) > self._max_waiting

    def add(self, attempt: DecodeAttempt) -> None:
        self._attempts[attempt] = None

    def remove(self, attempt: DecodeAttempt) -> None:
        """Idempotent."""
        self._attempts.pop(attempt, None)

    def in_order(self) -> list[DecodeAttempt]:
        """The next to be granted first."""
        return sorted(
            self._attempts, key=lambda attempt: (-attempt.priority, attempt.since_s, attempt.serial)
        )

    def in_need_of_nothing(self) -> list[DecodeAttempt]:
        """Those who take no place from anybody, in any order."""
        return [attempt for attempt in self._attempts if attempt.ends_there]

    def candidates(self, now_s: float) -> list[DecodeAttempt]:
        """Who may be granted now, in order of preference: all, or only the oldest if it has waited long enough."""
        if not self._attempts:
            return []
        oldest = min(self._attempts, key=lambda attempt: (attempt.since_s, attempt.serial))
        if now_s - oldest.since_s >= OVERTAKE_S:
            return [oldest]
        return self.in_order()
