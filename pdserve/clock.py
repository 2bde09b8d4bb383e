"""The clock port: monotonic seconds for time-outs, wall-clock nanoseconds for epochs and logs."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Any thread may call."""

    def now_s(self) -> float:
        """Monotonic seconds; only differences mean something."""
        ...

    def wall_ns(self) -> int:
        """Nanoseconds since 1970-01-01 UTC."""
        ...


def thread_cpu_s() -> float:
    """What the calling thread has computed so far: unlike time that passes, not what others do on its core."""
    return time.thread_time()


def spend_s(seconds: float) -> None:
    """Block the calling thread for so long, as work would: of the fake engine only, whatever else waits for events."""
    time.sleep(seconds)


class SystemClock:
    """The machine's clocks."""

    def now_s(self) -> float:
        return time.monotonic()

    def wall_ns(self) -> int:
        return time.time_ns()

    def cpu_s(self) -> float:
        """CPU seconds of this process so far, all of its threads."""
        return time.process_time()
