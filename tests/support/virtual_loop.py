"""An asyncio event loop whose time is a VirtualClock: no test waits, and the same calls give the same trace.

Where another loop would wait for its next timer, this one moves the clock there; with no timer and nothing ready it
raises `Hang`, because in one process without sockets nothing could come any more. Timers of one moment fire in the
order in which they were set. Tasks hash by a serial number, so what asyncio keeps in sets (a TaskGroup's tasks, for
one) comes out in the order in which it was made, not by memory address.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, TypeVar, TypeVarTuple, Unpack

from tests.support.virtual_clock import VirtualClock

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Hang(AssertionError):
    """Work is in hand and nothing can ever happen again, or virtual time has passed its limit."""


class LeftBehind(AssertionError):
    """The main coroutine has ended and tasks of its are still there, or one of them failed unseen."""


class _SerialTask(asyncio.Task[Any]):
    """A task whose hash is its serial number on its loop."""

    def __init__(self, coro: Coroutine[Any, Any, Any], loop: VirtualLoop, context: Context | None) -> None:
        self.serial = loop.next_serial()  # before Task.__init__, which already hashes the task
        super().__init__(coro, loop=loop, name=f"t{self.serial}", context=context)

    def __hash__(self) -> int:
        return self.serial


class VirtualLoop(asyncio.BaseEventLoop):
    """The event loop over a VirtualClock; `unseen` collects what went to the exception handler.

    limit_s  virtual moment behind which waiting counts as a hang; None = no limit
    """

    _ready: deque[asyncio.Handle]  # asyncio's own
    _stopping: bool

    def __init__(self, clock: VirtualClock, limit_s: float | None = None) -> None:
        super().__init__()
        self.clock = clock
        self._limit_s = limit_s
        self._num_tasks = 0
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._num_timers = 0
        self.unseen: list[dict[str, Any]] = []
        self.set_task_factory(_make_task)
        self.set_exception_handler(lambda _, context: self.unseen.append(context))

    def time(self) -> float:
        return self.clock.now_s()

    def next_serial(self) -> int:
        """1, 2, 3, …"""
        self._num_tasks += 1
        return self._num_tasks

    # --- what asyncio.BaseEventLoop does with a selector and a heap of handles, without either: a simulation sets
    # some hundred thousand timers a second

    def call_soon(
        self, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_later(
        self,
        delay: float,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        return self.call_at(self.clock.now_s() + delay, callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        self._num_timers += 1
        heapq.heappush(self._timers, (when, self._num_timers, timer))
        return timer

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """It stays in the heap until its moment."""

    def _write_to_self(self) -> None:
        """`call_soon_threadsafe` wakes nobody: there is one thread."""

    def _run_once(self) -> None:
        ready, timers, clock = self._ready, self._timers, self.clock
        now_s = clock.now_s()
        if not ready and not self._stopping:
            while timers and timers[0][2].cancelled():
                heapq.heappop(timers)
            if not timers:
                raise Hang(f"no timer and nothing ready at {now_s:.6f}")
            if timers[0][0] > now_s:
                now_s = timers[0][0]
                clock.advance_to(now_s)
                if self._limit_s is not None and now_s > self._limit_s:
                    raise Hang(f"still running at the limit of {self._limit_s:.6f}")
        while timers and timers[0][0] <= now_s:
            ready.append(heapq.heappop(timers)[2])
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle.cancelled():
                handle._run()


def _make_task(
    loop: asyncio.AbstractEventLoop, coro: Any, *, context: Context | None = None
) -> asyncio.Future[Any]:
    assert isinstance(loop, VirtualLoop)
    return _SerialTask(coro, loop, context)


def run_virtual(
    main: Coroutine[Any, Any, T], clock: VirtualClock | None = None, *, limit_s: float = 86_400.0
) -> T:
    """Run `main` to its end under virtual time and return its result.

    limit_s  virtual seconds from now after which the run is a hang
    Raises Hang, with the tasks that wait and where; LeftBehind if tasks outlive `main` or failed unseen; else what
    `main` raises.
    """
    clock = clock if clock is not None else VirtualClock()
    loop = VirtualLoop(clock, clock.now_s() + limit_s)
    asyncio.set_event_loop(loop)
    try:
        result = loop.run_until_complete(main)
        left = _pending(loop)
        if left:
            raise LeftBehind("tasks left behind: " + "; ".join(_where(task) for task in left))
        if loop.unseen:
            raise LeftBehind(f"failed unseen: {loop.unseen}") from loop.unseen[0].get("exception")
        return result
    except Hang as hang:
        waiting = "\n  ".join(_where(task) for task in _pending(loop))
        raise Hang(f"{hang}; these tasks wait:\n  {waiting}") from None
    finally:
        _cancel_rest(loop)
        asyncio.set_event_loop(None)
        loop.close()


def _pending(loop: VirtualLoop) -> list[asyncio.Task[Any]]:
    return sorted((task for task in asyncio.all_tasks(loop) if not task.done()), key=hash)


def _where(task: asyncio.Task[Any]) -> str:
    frames = task.get_stack()
    place = f"{frames[-1].f_code.co_filename}:{frames[-1].f_lineno}" if frames else "?"
    return f"{task.get_name()} {getattr(task.get_coro(), '__qualname__', '?')} at {place}"


def _cancel_rest(loop: VirtualLoop) -> None:
    rest = _pending(loop)
    for task in rest:
        task.cancel()
    if rest:
        loop.run_until_complete(asyncio.gather(*rest, return_exceptions=True))
