"""One call for all who want the same answer; it ends when nobody wants it any longer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, Generic, TypeVar

from pdserve.errors import Failure, PdserveError, from_failure, to_failure

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")

Spawn = Callable[[Coroutine[Any, Any, Any]], asyncio.Task[Any]]


class _Call(Generic[T]):
    def __init__(self, task: asyncio.Task[T | Failure]) -> None:
        self.task = task
        self.num_waiting = 0


class SharedCalls(Generic[K, T]):
    """Event loop only. spawn: begins a task in the owner's task group."""

    def __init__(self, spawn: Spawn) -> None:
        self._spawn = spawn
        self._calls: dict[K, _Call[T]] = {}

    def __contains__(self, key: K) -> bool:
        """Whether such a call is being made."""
        return key in self._calls

    async def join(self, key: K, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The answer of the call for this key: of the one that is being made, or of a new one.

        Raises its PdserveError, to each who waits. A caller that is cancelled leaves; the last one ends the call.
        """
        call = self._calls.get(key)
        if call is None:
            call = self._calls[key] = _Call(self._spawn(_answer(make())))
        call.num_waiting += 1
        try:
            found = await asyncio.shield(call.task)
        finally:
            call.num_waiting -= 1
            if not call.num_waiting:
                call.task.cancel()
                if self._calls.get(key) is call:
                    del self._calls[key]
        if isinstance(found, Failure):
            raise from_failure(found)
        return found


async def _answer(call: Coroutine[Any, Any, T]) -> T | Failure:
    """Never raises but CancelledError: an error goes to those who wait, not to the task group."""
    try:
        return await call
    except PdserveError as error:
        return to_failure(error)
