"""The clock of tests and simulations: it stands still until it is told to move (pdserve/clock.py is the port)."""

from __future__ import annotations


class VirtualClock:
    """A clock that moves only when told to: simulations and tests."""

    def __init__(self, start_s: float = 1_000.0) -> None:
        self._now_s = start_s

    def now_s(self) -> float:
        return self._now_s

    def wall_ns(self) -> int:
        return int(self._now_s * 1e9)

    def advance_to(self, now_s: float) -> None:
        """Move to a moment; never backwards."""
        if now_s < self._now_s:
            raise ValueError(f"virtual time can't go back from {self._now_s} to {now_s}")
        self._now_s = now_s

    def advance(self, by_s: float) -> None:
        """Move forward by so many seconds."""
        self.advance_to(self._now_s + by_s)
