"""Owners on the event loop, each call after a drawn delay: how a whole cluster runs in one process."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TypeVar

import structlog

from pdserve.owner import Owner, Post
from pdserve.worker.driver import OnDeath

log = structlog.get_logger()

T = TypeVar("T")


def at_once(call: Callable[[], T], done: Callable[[T], None], /) -> None:
    """A `Background` that does it right here."""
    done(call())


class DelayedInbox:
    """Messages of one sender inside one event loop: each arrives after a drawn delay, in the order of sending.

    `pause` and `resume` are the receiver's process stopped and continued; `stop` its end.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        delay: Callable[[], float],
        deliver: Callable[[object], None],
    ) -> None:
        self._loop = loop
        self._delay = delay
        self._deliver = deliver
        self._due_s = 0.0
        self._on_the_way: deque[object] = deque()
        self._held: deque[object] = deque()
        self._paused = False
        self._stopped = False

    def post(self, message: object) -> None:
        if self._stopped:
            return
        self._due_s = max(self._loop.time() + self._delay(), self._due_s)
        # Timers of one moment fire in any order: each takes the oldest message.
        self._on_the_way.append(message)
        self._loop.call_at(self._due_s, self._arrive)

    def pause(self) -> None:
        self._paused = True

    def resume(self) -> None:
        self._paused = False
        self._deliver_held()

    def stop(self) -> None:
        self._stopped = True
        self._held.clear()

    def _arrive(self) -> None:
        self._held.append(self._on_the_way.popleft())
        self._deliver_held()

    def _deliver_held(self) -> None:
        while self._held and not (self._paused or self._stopped):
            self._deliver(self._held.popleft())


class LoopDriver:
    """Runs an owner on the event loop, each call after a delay that the caller draws (usually from a seed).

    `pause` and `resume` are a process that is stopped and continued; `stop` is one that is killed. Loop thread only.

    watch  wraps the owner in one that looks on
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        delay: Callable[[], float],
        name: str,
        on_death: OnDeath,
        watch: Callable[[Owner], Owner] = lambda owner: owner,
    ) -> None:
        self._owner: Owner | None = None
        self._watch = watch
        self._loop = loop
        self._delay = delay
        self._name = name
        self._on_death = on_death
        self._senders: dict[str, DelayedInbox] = {}
        self._held: deque[object] = deque()
        self._turn: asyncio.TimerHandle | None = None
        self._paused = False
        self._stopped = False

    def post(self, message: object) -> None:
        self.port("")(message)

    def port(self, sender: str) -> Post:
        """A post whose messages keep their order among themselves, not with those of other senders."""
        if sender not in self._senders:
            self._senders[sender] = DelayedInbox(self._loop, self._delay, self._arrive)
        return self._senders[sender].post

    def wake(self) -> None:
        """Have the owner take a turn."""
        self._turn_in(0.0)

    def start(self, owner: Owner) -> None:
        self._owner = self._watch(owner)
        self._take_in()

    def pause(self) -> None:
        """Stop calling the owner; messages pile up."""
        self._paused = True
        self._cancel_turn()

    def resume(self) -> None:
        """Go on where `pause` stopped."""
        self._paused = False
        self._take_in()

    def stop(self) -> None:
        self._stopped = True
        self._held.clear()
        self._cancel_turn()

    @property
    def _is_running(self) -> bool:
        return self._owner is not None and not self._paused and not self._stopped

    def _arrive(self, message: object) -> None:
        self._held.append(message)
        self._take_in()

    def _take_in(self) -> None:
        try:
            while self._held and self._is_running:
                assert self._owner is not None
                self._owner.handle(self._held.popleft())
        except Exception as error:
            self._die(error)
        self._turn_in(0.0)

    def _turn_in(self, wait_s: float) -> None:
        if not self._is_running:
            return  # `start` and `resume` begin with a turn
        at_s = self._loop.time() + max(wait_s, self._delay())
        if self._turn is not None and self._turn.when() <= at_s:
            return
        self._cancel_turn()
        self._turn = self._loop.call_at(at_s, self._take_turn)

    def _take_turn(self) -> None:
        self._turn = None
        assert self._owner is not None
        try:
            wait_s = self._owner.step()
        except Exception as error:
            self._die(error)
            return
        if wait_s is not None:
            self._turn_in(wait_s)

    def _cancel_turn(self) -> None:
        if self._turn is not None:
            self._turn.cancel()
            self._turn = None

    def _die(self, error: Exception) -> None:
        self.stop()
        log.error("owner.died", owner=self._name, exc_info=error)
        self._on_death(error)
