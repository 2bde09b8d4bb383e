"""Work that would hold up the loop, done beside it: in small steps, users in turn, within a budget of bytes."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from pdserve.clock import Clock
from pdserve.errors import Overloaded
from pdserve.service.rpc_requests import READ_AT_ONCE_BYTES
from pdserve.steps import Steps, at_once
from router.metrics import RouterMetrics
from router.queue import FairQueue
from router.work import Work

T = TypeVar("T")
NUM_THREADS = 2
_BYTES_PER_S = 1_000_000  # of text, about, that one thread encodes


@dataclass(eq=False, slots=True)
class _Waiting:
    """One step that waits for a thread."""

    user: str
    queued_s: float
    go: asyncio.Future[None]
    priority: int = field(default=0, init=False)
    replay: bool = field(default=False, init=False)


@dataclass(frozen=True, slots=True)
class _Done(Generic[T]):
    value: T


class Turns:
    """Event-loop thread only.

    Each step waits for its user's turn, so a user with much to do holds up the others by a step; and what is cancelled
    stops after the step that runs.

    max_bytes  of all that is in hand. What comes above it is refused if its user has more than an even share
    """

    def __init__(
        self, work: Work, clock: Clock, metrics: RouterMetrics, max_bytes: int, num_threads: int = NUM_THREADS
    ) -> None:
        self._work = work
        self._clock = clock
        self._metrics = metrics
        self._max_bytes = max_bytes
        self._num_threads = num_threads
        self._num_free = num_threads
        self._queue: FairQueue[_Waiting] = FairQueue()
        self._held: Counter[str] = Counter()  # bytes by user

    async def run(self, steps: Steps[T], *, user: str, num_bytes: int) -> T:
        """Do all steps and return their result.

        user       whose turn it takes
        num_bytes  what it reads, about
        Raises Overloaded at once if that is too much beside what is in hand, and whatever the steps raise.
        """
        self._take_in(user, num_bytes)
        try:
            while True:
                await self._turn(user)
                try:
                    done = await self._work.run(lambda: _next(steps))
                finally:
                    self._pass_on()
                if done is not None:
                    return done.value
        finally:
            self._held[user] -= num_bytes
            if not self._held[user]:
                del self._held[user]
            self._metrics.reading_bytes.dec(num_bytes)

    async def call(self, call: Callable[[], T], *, user: str, num_bytes: int) -> T:
        """As `run`, of one step; right here if it reads little."""
        if num_bytes <= READ_AT_ONCE_BYTES:
            return call()
        return await self.run(at_once(call), user=user, num_bytes=num_bytes)

    def _take_in(self, user: str, num_bytes: int) -> None:
        all_bytes = self._held.total() + num_bytes
        own_bytes = self._held[user] + num_bytes
        num_users = len(self._held) + (user not in self._held)
        if all_bytes > self._max_bytes and own_bytes > self._max_bytes // num_users:
            self._metrics.reading_refused.inc()
            raise Overloaded(
                "too much is being read for requests",
                limit_bytes=self._max_bytes,
                value=all_bytes,
                retry_after_s=round(self._held.total() / _BYTES_PER_S / self._num_threads, 1),
            )
        self._held[user] = own_bytes
        self._metrics.reading_bytes.inc(num_bytes)

    async def _turn(self, user: str) -> None:
        if self._num_free:
            self._num_free -= 1
            return
        now_s = self._clock.now_s()
        waiting = _Waiting(user, now_s, asyncio.get_running_loop().create_future())
        self._queue.push(waiting, now_s)
        try:
            await waiting.go
        except asyncio.CancelledError:
            if waiting.go.done() and not waiting.go.cancelled():
                self._pass_on()  # it was its turn in this very moment
            raise
        finally:
            self._queue.remove(waiting)

    def _pass_on(self) -> None:
        """A thread is free: to whoever's turn it is."""
        now_s = self._clock.now_s()
        while (waiting := self._queue.first_new(now_s)) is not None:
            self._queue.served(waiting, now_s)
            if not waiting.go.cancelled():  # in this very moment
                waiting.go.set_result(None)
                return
        self._num_free += 1


def _next(steps: Steps[T]) -> _Done[T] | None:
    """On another thread: one step."""
    try:
        next(steps)
    except StopIteration as end:
        return _Done(end.value)
    return None
