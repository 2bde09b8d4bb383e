"""Copies under way on a device: known to be over by the event behind each, asked for at every turn.

Whatever ends, a copy that was begun goes on. If it takes lease_s, or the device has failed, nobody knows what may still
be written: the process must end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from pdserve.clock import Clock
from pdserve.errors import InvariantViolated, WorkerLost

_POLL_LEAST_S, _POLL_MOST_S = 0.00005, 0.01
_POLL_SHARE = 0.25  # of what it has taken so far, whatever is waited for


class CopyEvents(Protocol):
    """Of one stream of a device. Events are numbers, never reused."""

    def record(self) -> int:
        """An event behind all copies that were begun. Raises WorkerLost."""
        ...

    def is_over(self, event: int) -> bool:
        """Whether the device is done with the copies before the event; asked until it is, then no more.

        Raises WorkerLost when the device has failed: then nobody knows what it did.
        """
        ...


@dataclass(slots=True, eq=False)
class _Copying:
    event: int
    began_s: float
    told: Callable[[], None]


class DeviceCopies:
    """The copies of one stream, which are over in the order in which they were begun. Transfer owner only.

    what  is copied, for the words of an error
    """

    def __init__(self, events: CopyEvents, what: str, *, clock: Clock, lease_s: float) -> None:
        self._events = events
        self._what = what
        self._clock = clock
        self._lease_s = lease_s
        self._copying: deque[_Copying] = deque()
        self._looked_s = clock.now_s()
        self._failed: WorkerLost | None = None

    @property
    def num_pending(self) -> int:
        """Any thread."""
        return len(self._copying)

    def begin(self, copy: Callable[[], None], told: Callable[[], None]) -> None:
        """copy: begins it; told: called by `poll` when it is over, also if `copy` raises, which this passes on."""
        now_s = self._clock.now_s()
        if not self._copying:
            self._looked_s = now_s
        try:
            copy()
        finally:  # a part of it may have begun before it failed
            self._copying.append(_Copying(self._record(), now_s, told))

    def _record(self) -> int:
        try:
            return self._events.record()
        except WorkerLost as error:
            self._failed = error
            raise

    def poll(self) -> None:
        """See what is done. Raises InvariantViolated when the device can't be trusted with memory any longer."""
        now_s = self._clock.now_s()
        if now_s >= self._looked_s + self._lease_s / 2:
            self._stood_still(now_s)
        self._looked_s = now_s
        try:
            while self._copying and self._events.is_over(self._copying[0].event):
                self._copying.popleft().told()
        except WorkerLost as error:
            self._failed = error
        if self._failed is not None:
            raise InvariantViolated(f"the device failed at {self._what}", said=self._failed)
        if self._copying and now_s >= self._copying[0].began_s + self._lease_s:
            raise InvariantViolated(
                f"{self._what} doesn't end: the device may still write memory that is in use",
                waited_s=round(now_s - self._copying[0].began_s, 3),
            )

    def _stood_still(self, now_s: float) -> None:
        """Not the device but this process, stopped and continued: it has seen nothing of the time that passed."""
        for copying in self._copying:
            copying.began_s = now_s

    def next_due_s(self) -> float | None:
        """A device wakes nobody."""
        if not self._copying:
            return None
        now_s = self._clock.now_s()
        waited_s = now_s - self._copying[0].began_s
        return now_s + min(max(waited_s * _POLL_SHARE, _POLL_LEAST_S), _POLL_MOST_S)
