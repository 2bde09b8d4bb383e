"""What an event loop's thread is doing while its timer is late: the callback that holds it up, by name."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import structlog

from pdserve.clock import Clock

log = structlog.get_logger()

LATE_S = 0.1
_LOOK_S = 0.05
_TOLD_EVERY_S = 10.0
_NUM_FRAMES = 8
_WAITING = (
    "asyncio",
    "selectors.py",
    "uvloop",
)  # where an idle loop stands: then the machine is late, not the loop


class LoopStack:
    """Looks from a thread of its own; logs `loop.held` once for each time that the loop is held up, at most so often.

    late_s  how long the loop may go without a beat
    """

    def __init__(self, clock: Clock, late_s: float = LATE_S) -> None:
        self._clock = clock
        self._late_s = late_s
        self._beat_s = clock.now_s()
        self._looked_at_s = 0.0  # the beat that was late, so that each is told once
        self._told_s = -_TOLD_EVERY_S
        self._num_untold = 0
        self._loop_thread = 0
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """On the loop's thread, which is the one to be looked at."""
        self._loop_thread = threading.get_ident()
        self.beat()
        self._thread = threading.Thread(target=self._run, name="loop-stack", daemon=True)
        self._thread.start()

    def beat(self) -> None:
        """On the loop: it lives."""
        self._beat_s = self._clock.now_s()

    def stop(self) -> None:
        """Idempotent."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while not self._stopped.wait(_LOOK_S):
            self.look()

    def look(self) -> None:
        """On any other thread: tell what holds the loop up, if it is and that is news."""
        beat_s, now_s = self._beat_s, self._clock.now_s()
        if now_s - beat_s < self._late_s or beat_s == self._looked_at_s:
            return
        frame = sys._current_frames().get(self._loop_thread)
        if frame is None or _is_waiting(frame):
            return
        self._looked_at_s = beat_s
        if now_s - self._told_s < _TOLD_EVERY_S:
            self._num_untold += 1
            return
        self._told_s = now_s
        log.warning(
            "loop.held",
            late_s=round(now_s - beat_s, 3),
            frames=list(_innermost(frame)),
            num_untold=self._num_untold,
        )
        self._num_untold = 0


def _is_waiting(frame: FrameType) -> bool:
    file = Path(frame.f_code.co_filename)
    return file.name in _WAITING or file.parent.name in _WAITING


def _innermost(frame: FrameType | None) -> Iterator[str]:
    """The last calls, the innermost first, without those of the event loop."""
    for _ in range(_NUM_FRAMES):
        if frame is None or _is_waiting(frame):
            return
        code = frame.f_code
        yield f"{code.co_qualname} ({Path(code.co_filename).name}:{frame.f_lineno})"
        frame = frame.f_back
