"""Copies between a device's pool and pinned memory, as they behave and as they may be used, on an injected schedule.

    the calls of one thread only       memory: pinned once, and no byte of it in two copies at once
    a copy: inside pool and memory     an event: behind copies, asked until it is over

Whoever breaks one of these hears of it (StagingMisused). A copy reads and writes when the device comes to it, whatever
its transfer owner knows by then, and in the order of its stream.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from pdserve.errors import WorkerLost
from pdserve.kv_memory import ByteSpan
from tests.support.memories import DeviceMemory
from tests.support.memory_channel import DeviceWatch, Schedule

_FAILED = "an illegal memory access was encountered"


class StagingMisused(AssertionError):
    """A rule of CUDA, or of ours for it, is broken."""


def _rule(holds: bool, what: str) -> None:
    if not holds:
        raise StagingMisused(what)


@dataclass(slots=True, eq=False)
class _Copy:
    """at: where in the pinned memory; is_fetch: out of the pool."""

    span: ByteSpan
    at: int
    is_fetch: bool
    is_over: bool = False


class LoopCopies:
    """One process's device: HostCopies (kv_transfer/transports/staging_port.py).

    wake          of the present transfer owner: the next one, in another role, brings its own
    copy_takes_s  in place of a drawn time
    """

    def __init__(
        self,
        memory: DeviceMemory,
        *,
        schedule: Schedule,
        delay: Callable[[], float],
        wake: Callable[[], None],
        watch: DeviceWatch | None = None,
    ) -> None:
        self.wake = wake
        self.fails: dict[str, str] = {}  # the next call of this name fails with these words
        self.copy_takes_s: float | None = None
        self.has_failed = False  # the device: every event says so
        self.is_dead = False
        self.num_copies = 0  # begun
        self.pinned = memoryview(b"")
        self.memory = memory
        self._schedule = schedule
        self._delay = delay
        self._watch = watch
        self._lane: deque[_Copy] = deque()
        self._events: dict[int, list[_Copy]] = {}
        self._num_events = 0
        self._thread: int | None = None

    @property
    def num_under_way(self) -> int:
        return len(self._lane)

    # --- the calls

    def pin(self, num_bytes: int) -> memoryview:
        self._enter("pin")
        _rule(not self.pinned, "memory pinned twice")
        self.pinned = memoryview(bytearray(num_bytes))
        return self.pinned

    def fetch(self, span: ByteSpan, into: int) -> None:
        self._enter("fetch")
        self._begin(_Copy(span, into, is_fetch=True))

    def store(self, start: int, into: ByteSpan) -> None:
        self._enter("store")
        self._begin(_Copy(into, start, is_fetch=False))

    def record(self) -> int:
        self._enter("record")
        self._num_events += 1
        self._events[self._num_events] = list(self._lane)
        return self._num_events

    def is_over(self, event: int) -> bool:
        self._enter("is_over")
        _rule(event in self._events, "an event that isn't, or was over")
        if self.has_failed:
            raise WorkerLost("CUDA failed", call="cuEventQuery", said=_FAILED)
        if not all(copy.is_over for copy in self._events[event]):
            return False
        del self._events[event]
        return True

    # --- the device

    def _begin(self, copy: _Copy) -> None:
        span, end = copy.span, copy.at + copy.span.num_bytes
        _rule(0 <= span.start <= span.end <= self.memory.num_bytes, "a copy outside of the pool")
        _rule(0 <= copy.at <= end <= len(self.pinned), "a copy outside of the pinned memory")
        _rule(
            all(end <= other.at or other.at + other.span.num_bytes <= copy.at for other in self._lane),
            "two copies of the same bytes of the host",
        )
        self.num_copies += 1
        self._lane.append(copy)
        if len(self._lane) == 1:
            self._go_on()

    def _go_on(self) -> None:
        self._schedule(self._delay() if self.copy_takes_s is None else self.copy_takes_s, self._end)

    def _end(self) -> None:
        if self.is_dead:
            return
        copy = self._lane[0]
        span = copy.span
        host, pool = self.pinned[copy.at : copy.at + span.num_bytes], self.memory.bytes[span.start : span.end]
        if copy.is_fetch:
            if self._watch is not None:
                self._watch.device_reads(span)
            host[:] = pool
        else:
            if self._watch is not None:
                self._watch.device_writes(span)
            pool[:] = host
        copy.is_over = True
        self._lane.popleft()
        if self._lane:
            self._go_on()
        self.wake()

    def die(self) -> None:
        """The process is gone, as by kill -9, and what it had in hand with it."""
        self.is_dead = True
        self._lane.clear()

    def _enter(self, call: str) -> None:
        here = threading.get_ident()
        self._thread = self._thread or here
        _rule(self._thread == here, f"{call}: a call from another thread")
        if call in self.fails:
            raise WorkerLost("CUDA failed", call=call, said=self.fails.pop(call))
