"""How long something held up an event loop, seen whenever it happens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Histogram

from pdserve.clock import Clock
from pdserve.service.loop_stack import LoopStack

PERIOD_S = 0.02
_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)


class LoopWatch:
    """A timer that says how late it comes. Event-loop thread only.

    A timer is late because a call, or C code on another thread, kept the interpreter, or because the machine had no
    core for this process. Only the first takes CPU time of the process, so the lesser of both is what it did itself.

    cpu_s  CPU seconds of the process, all of its threads
    stack  tells what the loop is doing while the timer is late
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        clock: Clock,
        cpu_s: Callable[[], float],
        stack: LoopStack | None = None,
    ) -> None:
        self._stack = stack
        self._clock = clock
        self._cpu_s = cpu_s
        self._lag_s = Histogram(
            "pdserve_loop_lag_seconds",
            "How late a timer came that the event loop runs every 20 ms.",
            registry=registry,
            buckets=_BUCKETS_S,
        )
        self._held_s = Histogram(
            "pdserve_loop_held_seconds",
            "What the process itself was computing while a timer of its loop was late.",
            registry=registry,
            buckets=_BUCKETS_S,
        )
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = 0.0
        self._cpu_before_s = 0.0

    def start(self) -> None:
        """On the running loop."""
        if self._stack is not None:
            self._stack.start()
        self._wait()

    def _wait(self) -> None:
        self._due_s = self._clock.now_s() + PERIOD_S
        self._cpu_before_s = self._cpu_s()
        self._timer = asyncio.get_running_loop().call_later(PERIOD_S, self._tick)

    def stop(self) -> None:
        """Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            if self._stack is not None:
                self._stack.stop()

    def _tick(self) -> None:
        lag_s = max(0.0, self._clock.now_s() - self._due_s)
        self._lag_s.observe(lag_s)
        self._held_s.observe(min(lag_s, self._cpu_s() - self._cpu_before_s))
        if self._stack is not None:
            self._stack.beat()
        self._wait()
