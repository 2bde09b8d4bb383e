"""Each simulated process has clocks of its own: begun at another moment, running at another pace."""

from __future__ import annotations

import random

from pdserve.clock import Clock
from tests.support.virtual_clock import VirtualClock

MAX_AHEAD_S = 100_000.0
MAX_PACE_ERROR = 0.01
MAX_WALL_ERROR_S = 600.0


class SkewedClock:
    """The clocks of one machine beside the simulation's own.

    ahead_s       how far its monotonic clock stands before the simulation's at the start
    pace          its seconds in one of the simulation's
    wall_ahead_s  how wrong its wall clock is
    """

    def __init__(self, true: VirtualClock, *, ahead_s: float, pace: float, wall_ahead_s: float) -> None:
        self._true = true
        self._begin_s = true.now_s()
        self._ahead_s = ahead_s
        self._pace = pace
        self._wall_ahead_s = wall_ahead_s

    def now_s(self) -> float:
        return self._ahead_s + (self._true.now_s() - self._begin_s) * self._pace

    def wall_ns(self) -> int:
        return int((self._true.now_s() + self._wall_ahead_s) * 1e9)


def drawn_clock(true: VirtualClock, source: random.Random) -> Clock:
    """A clock as wrong as a source says."""
    return SkewedClock(
        true,
        ahead_s=MAX_AHEAD_S * source.random(),
        pace=1.0 + MAX_PACE_ERROR * (2.0 * source.random() - 1.0),
        wall_ahead_s=MAX_WALL_ERROR_S * (2.0 * source.random() - 1.0),
    )
