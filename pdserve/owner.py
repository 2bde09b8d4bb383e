"""Owners of state and the driver port that runs them.

An owner (engine, transfer) is a synchronous class without threads, sleeps or sockets of its own making. A driver
calls it: a thread of its own in production (`pdserve.worker.driver`), in simulations the event loop, after a delay
that a seed draws. Owners talk by messages only; a driver keeps the order of the messages of one sender to one receiver.
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


Post = Callable[[object], None]
"""Sends one message to another owner; never blocks."""


class Driver(Protocol):
    """Runs one owner. It exists before its owner does, so that owners can be given each other's posts."""

    def port(self, sender: str) -> Post:
        """Queues messages for the owner, in the order of this sender; any thread may call it, also before `start`."""
        ...

    def wake(self) -> None:
        """Have the owner take a turn; any thread may call."""
        ...

    def start(self, owner: Owner) -> None:
        """Begin to call the owner; once."""
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
