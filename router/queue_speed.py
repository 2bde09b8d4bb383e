"""How fast the queue moves: the time between two attempts that get their pair while others wait."""

from __future__ import annotations

KEPT = 0.9  # of the average, with each new one


class QueueSpeed:
    """Idle times don't count: what came to an empty queue says nothing about how fast a full one moves."""

    def __init__(self) -> None:
        self._last_s: float | None = None  # when one got its pair and left others waiting
        self._interval_s: float | None = None

    def started(self, now_s: float, *, others_wait: bool) -> None:
        """One got its pair."""
        if self._last_s is not None:
            took_s = now_s - self._last_s
            known_s = self._interval_s
            self._interval_s = took_s if known_s is None else KEPT * known_s + (1 - KEPT) * took_s
        self._last_s = now_s if others_wait else None

    def emptied(self) -> None:
        """Nothing waits any longer, for whatever reason."""
        self._last_s = None

    def wait_s(self, num_ahead: int, now_s: float) -> float:
        """How long until so many have got their pair; a queue that stands still slows it down."""
        if self._interval_s is None:
            return 0.0
        stands_s = 0.0 if self._last_s is None else now_s - self._last_s
        return num_ahead * max(self._interval_s, min(stands_s, 10 * self._interval_s))
