"""The clock port: monotonic seconds for time-outs, wall-clock nanoseconds for epochs and logs."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Any thread may call."""

    def now_s(self) -> float:
        """Monotonic seconds; only differences mean something."""
        ...

    def wall_ns(self) -> int:
        """Nanoseconds since 1970-01-01 UTC."""
        ...


class SystemClock:
    """The machine's clocks."""

    def now_s(self) -> float:
        return time.monotonic()

    def wall_ns(self) -> int:
        return time.time_ns()


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
