"""How the transfer owner's thread waits: on its selector, which also hears a wake from other threads."""

from __future__ import annotations

import selectors
import socket


class SelectorWaiter:
    """Waiter (pdserve/owner.py) over sockets. What is ready, the network's `poll` finds out at each turn.

    Only `wait` takes wakes away: one that comes between the owner's look at its queue and its `wait` ends that wait.
    """

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._near, self._far = socket.socketpair()
        self._near.setblocking(False)
        self._far.setblocking(False)
        selector.register(self._near, selectors.EVENT_READ, self)

    def wait(self, timeout_s: float | None) -> None:
        """Return when a socket is ready, after `wake`, or after the time-out."""
        if any(key.data is self for key, _events in self._selector.select(timeout_s)):
            self._drain()

    def wake(self) -> None:
        """Any thread. A wake that finds the pipe full is one already."""
        try:
            self._far.send(b"\0")
        except (BlockingIOError, OSError):
            return

    def _drain(self) -> None:
        try:
            while self._near.recv(4096):
                pass
        except BlockingIOError:
            return

    def close(self) -> None:
        self._near.close()
        self._far.close()
