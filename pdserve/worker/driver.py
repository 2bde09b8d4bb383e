"""What runs an owner of state on a thread, and what brings the messages of other threads to the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable

import structlog

from pdserve.owner import Owner, Post, Waiter

log = structlog.get_logger()

OnDeath = Callable[[BaseException], None]
"""Told once, on the driver's own thread, that the owner raised and will never be called again."""


class EventWaiter:
    """Waits on an event: for owners that watch no sockets."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def wait(self, timeout_s: float | None) -> None:
        if timeout_s != 0.0:
            self._event.wait(timeout_s)
        self._event.clear()

    def wake(self) -> None:
        self._event.set()


class ThreadDriver:
    """Runs an owner on a thread of its own. An exception of the owner ends it: its state can't be trusted."""

    def __init__(self, waiter: Waiter, name: str, on_death: OnDeath) -> None:
        self._waiter = waiter
        self._name = name
        self._on_death = on_death
        self._inbox: deque[object] = deque()
        self._stopping = False
        self._thread: threading.Thread | None = None

    def post(self, message: object) -> None:
        self._inbox.append(message)
        self._waiter.wake()

    def port(self, sender: str) -> Post:
        """All senders share one queue."""
        return self.post

    def wake(self) -> None:
        self._waiter.wake()

    def start(self, owner: Owner) -> None:
        self._thread = threading.Thread(target=self._run, args=(owner,), name=self._name, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopping = True
        self._waiter.wake()
        if self._thread is not None and threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self, owner: Owner) -> None:
        try:
            while not self._stopping:
                while self._inbox and not self._stopping:
                    owner.handle(self._inbox.popleft())
                self._waiter.wait(owner.step())
        except Exception as error:
            log.exception("owner.died", owner=self._name)
            self._on_death(error)


class LoopInbox:
    """Messages of other threads to the event loop, delivered in order, many in one wake-up of the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, deliver: Callable[[object], None]) -> None:
        self._loop = loop
        self._deliver = deliver
        self._inbox: deque[object] = deque()
        self._woken = False

    def post(self, message: object) -> None:
        """Any thread."""
        self._inbox.append(message)
        if not self._woken:
            self._woken = True
            self._loop.call_soon_threadsafe(self._drain)

    def _drain(self) -> None:
        self._woken = False  # first: a message that comes from here on wakes the loop again
        while self._inbox:
            self._deliver(self._inbox.popleft())
