"""An asyncio event loop whose time is a VirtualClock: no test waits, and the same calls give the same trace.

The selector, asked to wait, moves the clock to the next timer instead; asked to wait for ever, it raises `Hang`,
because in one process without sockets nothing could come any more. Tasks hash by a serial number, so what asyncio
keeps in sets (a TaskGroup's tasks, for one) comes out in the order in which it was made, not by memory address.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from contextvars import Context
from typing import Any, TypeVar

from pdserve.clock import VirtualClock

T = TypeVar("T")


class Hang(AssertionError):
    """Work is in hand and nothing can ever happen again, or virtual time has passed its limit."""


class LeftBehind(AssertionError):
    """The main coroutine has ended and tasks of its are still there, or one of them failed unseen."""


class VirtualSelector(selectors.SelectSelector):
    """Advances the clock where another selector would wait.

    limit_s  virtual moment behind which waiting counts as a hang; None = no limit
    """

    def __init__(self, clock: VirtualClock, limit_s: float | None = None) -> None:
        super().__init__()
        self._clock = clock
        self.limit_s = limit_s

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Hang(f"no timer and nothing ready at {self._clock.now_s():.6f}")
        if timeout > 0:
            self._clock.advance(timeout)
            if self.limit_s is not None and self._clock.now_s() > self.limit_s:
                raise Hang(f"still running at the limit of {self.limit_s:.6f}")
        return []


class _SerialTask(asyncio.Task[Any]):
    """A task whose hash is its serial number on its loop."""

    def __init__(self, coro: Coroutine[Any, Any, Any], loop: VirtualLoop, context: Context | None) -> None:
        self.serial = loop.next_serial()  # before Task.__init__, which already hashes the task
        super().__init__(coro, loop=loop, name=f"t{self.serial}", context=context)

    def __hash__(self) -> int:
        return self.serial


class VirtualLoop(asyncio.SelectorEventLoop):
    """The event loop over a VirtualClock; `unseen` collects what went to the exception handler."""

    def __init__(self, clock: VirtualClock, limit_s: float | None = None) -> None:
        self.clock = clock
        super().__init__(VirtualSelector(clock, limit_s))
        self._num_tasks = 0
        self.unseen: list[dict[str, Any]] = []
        self.set_task_factory(_make_task)
        self.set_exception_handler(lambda _, context: self.unseen.append(context))

    def time(self) -> float:
        return self.clock.now_s()

    def next_serial(self) -> int:
        """1, 2, 3, …"""
        self._num_tasks += 1
        return self._num_tasks


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
