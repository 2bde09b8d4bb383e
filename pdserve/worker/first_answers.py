"""An answer to every StartDecode in time, also while the engine can't give one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from pdserve.messages import Up


class FirstAnswers:
    """The engine answers between two steps. Where that may take as long as a router waits, Waiting goes out first.

    Loop only.

    after_s      how long the engine is waited for
    say_waiting  sends Waiting under (session id, handle)
    """

    def __init__(self, after_s: float, say_waiting: Callable[[int, int], None]) -> None:
        self._after_s = after_s
        self._say_waiting = say_waiting
        self._due: dict[tuple[int, int], asyncio.TimerHandle] = {}

    def asked(self, session_id: int, handle: int, *, engine_is_busy: bool) -> None:
        """StartDecode was read. engine_is_busy: its answer will certainly not come soon."""
        if engine_is_busy:
            self._say_waiting(session_id, handle)
            return
        key = (session_id, handle)
        self._due[key] = asyncio.get_running_loop().call_later(self._after_s, self._expired, key)

    def answered(self, session_id: int, message: Up) -> None:
        """The engine has said something; if about a StartDecode, that is answered."""
        if not self._due:
            return
        timer = self._due.pop((session_id, getattr(message, "handle", 0)), None)
        if timer is not None:
            timer.cancel()

    def close(self) -> None:
        """Say nothing from here on."""
        for timer in self._due.values():
            timer.cancel()
        self._due.clear()

    def _expired(self, key: tuple[int, int]) -> None:
        del self._due[key]
        self._say_waiting(*key)
