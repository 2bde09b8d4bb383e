"""One time-out that starts over with progress, cheap enough to restart at every token."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from pdserve.clock import Clock

LATE_S = 0.2  # a timer that fires so late tells that this process stood still
GRACE_S = 1.0  # the most that it then waits on, for what came meanwhile to be read


class ProgressTimer:
    """Calls `on_expired` once when `restart` or `stop` has not been called for the given time.

    A restart only moves the moment; the loop's timer is looked at when it fires. If it fires late, because this process
    was stopped or got no CPU, the news that it waits for may have come and lie unread: it waits on, once, for as long
    as it was late. Event-loop thread only.
    """

    def __init__(self, clock: Clock, on_expired: Callable[[], None]) -> None:
        self._clock = clock
        self._on_expired = on_expired
        self._due_s: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due_s = 0.0
        self._has_waited_on = False

    @property
    def active(self) -> bool:
        """Whether it will expire."""
        return self._due_s is not None

    def restart(self, after_s: float) -> None:
        """Expire in so many seconds from now unless called again before."""
        self._due_s = self._clock.now_s() + after_s
        self._has_waited_on = False
        if self._timer is not None:
            if self._timer_due_s <= self._due_s:
                return
            self._timer.cancel()
        self._arm(after_s)

    def pause(self) -> None:
        """Don't expire until restarted; cheaper than `stop` where that comes soon."""
        self._due_s = None

    def stop(self) -> None:
        """Don't expire, and leave no timer with the loop."""
        self._due_s = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self, after_s: float) -> None:
        self._timer_due_s = self._clock.now_s() + after_s
        self._timer = asyncio.get_running_loop().call_later(after_s, self._fired)

    def _fired(self) -> None:
        self._timer = None
        if self._due_s is None:
            return
        left_s = self._due_s - self._clock.now_s()
        if left_s > 1e-6:  # progress since; the loop's and our clock may differ by rounding
            self._arm(left_s)
            return
        if left_s < -LATE_S and not self._has_waited_on:
            self._has_waited_on = True
            self._arm(min(-left_s, GRACE_S))
            return
        self._due_s = None
        self._on_expired()
