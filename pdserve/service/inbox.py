"""What a session has received and its owner has not yet asked for: bounded, ended once."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from pdserve.errors import Incompatible, WorkerLost

M = TypeVar("M")

LIMIT = 64  # messages; behind them the transport's own flow control holds the sender back


class Inbox(Generic[M]):
    """Event-loop thread only; one reader.

    on_room  called after each message that was read
    """

    def __init__(self, peer: str, on_room: Callable[[], None], limit: int = LIMIT) -> None:
        self._peer = peer
        self._on_room = on_room
        self._limit = limit
        self._messages: deque[M] = deque()
        self._changed = asyncio.Event()
        self._end_reason: str | None = None
        self._misfit: Incompatible | None = None
        self._bug: Exception | None = None

    def __len__(self) -> int:
        return len(self._messages)

    @property
    def full(self) -> bool:
        return len(self._messages) >= self._limit

    @property
    def ended(self) -> bool:
        return self._end_reason is not None

    def put(self, message: M) -> None:
        """Take in a message; ignored after the end."""
        if self._end_reason is None:
            self._messages.append(message)
            self._changed.set()

    def end(self, reason: str, misfit: Incompatible | None = None) -> None:
        """No more messages will come; what is here can still be read. The first reason stays.

        misfit  why the other side will never have this one
        """
        if self._end_reason is None:
            self._end_reason, self._misfit = reason, misfit
            self._changed.set()

    def crash(self, bug: Exception) -> None:
        """End by a bug of this process, which its reader is to have."""
        if self._end_reason is None:
            self._bug = bug
            self.discard("a bug")

    def discard(self, reason: str) -> None:
        """End, and forget what was not read."""
        self._messages.clear()
        self.end(reason)

    async def get(self) -> M:
        """The next message. Raises WorkerLost after the end, Incompatible if that was the reason of the other side, and
        the bug after a crash."""
        while not self._messages:
            if self._bug is not None:
                raise self._bug
            if self._misfit is not None:
                raise self._misfit
            if self._end_reason is not None:
                raise WorkerLost("the session has ended", peer=self._peer, reason=self._end_reason)
            self._changed.clear()
            await self._changed.wait()
        message = self._messages.popleft()
        self._on_room()
        return message
