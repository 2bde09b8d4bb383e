"""From start to exit of a process: signals, drain, exit codes."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from types import TracebackType
from typing import Self

import structlog

from pdserve.service.config import TimeoutsConfig

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2  # the operator must change configuration or arguments; a restart won't help
EXIT_SUPERSEDED = 3  # another process has this worker id; a restart won't help
EXIT_UNSOUND = 4  # the engine hangs or its state is in doubt; restart
EXIT_INTERRUPTED = 130  # a second signal: not drained

log = structlog.get_logger()


def longest_drain_s(timeouts: TimeoutsConfig) -> float:
    """From the wish that a process ends to its end, at most.

    What `drain_s` ends still waits for its leases; a link's silence ends those at the latest.
    """
    return timeouts.drain_s + timeouts.lease_s + 1.0


class StopSignals:
    """SIGTERM and SIGINT as an event: the first asks for a drain, the second ends the process at once.

    A context manager around the life of a process, on the main thread's event loop.
    """

    def __init__(self, end_now: Callable[[int], None] = os._exit) -> None:
        self._end_now = end_now
        self._stop = asyncio.Event()

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)

    async def wait(self) -> None:
        """Return when the process is asked to stop."""
        await self._stop.wait()

    def _on_signal(self, number: int) -> None:
        name = signal.Signals(number).name
        if self._stop.is_set():
            log.warning("process.ended_at_once", signal=name)
            self._end_now(EXIT_INTERRUPTED)
            return
        log.info("process.stop_asked", signal=name)
        self._stop.set()
