"""Owners of state and the driver port that runs them.

An owner (engine, transfer) is a synchronous class without threads, sleeps or sockets of its own making. A driver
calls it: `ThreadDriver` on a thread of its own, `LoopDriver` on the event loop after a delay that a seed draws.
Owners talk by messages only; a driver keeps the order of the messages of one sender to one receiver.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Owner(Protocol):
    """One owner of state. All methods are called by its driver, never by two threads at once."""

    def handle(self, message: object) -> None:
        """Take in one message of another owner."""
        ...

    def step(self) -> float | None:
        """Do one bounded turn of work.

        returns  seconds until the next turn is due: 0.0 = at once, there is more to do; None = only when a message
                 comes (or, for the transfer owner, when a socket is ready)
        """
        ...


class Driver(Protocol):
    """Runs one owner."""

    def post(self, message: object) -> None:
        """Queue a message for the owner; any thread may call; never blocks."""
        ...

    def start(self) -> None:
        """Begin to call the owner."""
        ...

    def stop(self) -> None:
        """Stop calling the owner; returns when no call is running. Idempotent."""
        ...


class Waiter(Protocol):
    """How a ThreadDriver waits between turns: on an event, or on a selector that also watches sockets."""

    def wait(self, timeout_s: float | None) -> None:
        """Return after `wake`, when there is I/O for the owner, or after the time-out."""
        ...

    def wake(self) -> None:
        """Make the current or the next `wait` return; any thread may call."""
        ...


Post = Callable[[object], None]
"""Sends one message to another owner; never blocks."""
