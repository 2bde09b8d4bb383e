"""A stream of copies of a device that isn't there: a thread, which copies whatever the transfer owner does."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue


@dataclass(slots=True, eq=False)
class CopyDouble:
    """One that was begun."""

    copy: Callable[[], None]
    over: threading.Event = field(default_factory=threading.Event)


class StreamDouble:
    """CopyEvents (kv_transfer/transports/device_copies.py) of copies that `begin` was given, one after the other."""

    def __init__(self, name: str) -> None:
        self._num_events = 0
        self._events: dict[int, list[CopyDouble]] = {}
        self._on_device: list[CopyDouble] = []
        self._stream: SimpleQueue[CopyDouble] = SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def begin(self, copy: Callable[[], None]) -> CopyDouble:
        begun = CopyDouble(copy)
        self._on_device = [other for other in self._on_device if not other.over.is_set()]
        self._on_device.append(begun)
        self._stream.put(begun)
        return begun

    def record(self) -> int:
        self._num_events += 1
        self._events[self._num_events] = list(self._on_device)
        return self._num_events

    def is_over(self, event: int) -> bool:
        if not all(begun.over.is_set() for begun in self._events[event]):
            return False
        del self._events[event]
        return True

    def _run(self) -> None:
        """What a device does with its stream of copies."""
        while True:
            begun = self._stream.get()
            begun.copy()
            begun.over.set()
