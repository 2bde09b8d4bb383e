"""Lines that somebody from outside can cause, at any rate: of each kind so many pass in so long."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import structlog

from pdserve.clock import Clock

MOST_LINES, WINDOW_S = 20, 10.0

FROM_OUTSIDE = frozenset(
    {
        "request.refused",
        "session.refused",
        "worker.refused",
        "session.bad_message",
        "session.silent",
        "rpc.failed",
        "link.accept_failed",
        "link.down",
        "link.tls_refused",
    }
)


class LogRates:
    """A processor of structlog. Called by any thread; two that come at once may let a line more pass.

    The first line that passes after others were left out says how many: `num_left_out`.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._windows: dict[str, _Window] = {}

    def __call__(
        self, _logger: object, _method: str, event: MutableMapping[str, Any]
    ) -> MutableMapping[str, Any]:
        name = event.get("event")
        if name not in FROM_OUTSIDE:
            return event
        now_s = self._clock.now_s()
        window = self._windows.setdefault(str(name), _Window(now_s))
        if now_s - window.begun_s >= WINDOW_S:
            window.begun_s, window.num_lines = now_s, 0
        if window.num_lines >= MOST_LINES:
            window.num_left_out += 1
            raise structlog.DropEvent
        window.num_lines += 1
        if window.num_left_out:
            event["num_left_out"], window.num_left_out = window.num_left_out, 0
        return event


class _Window:
    """Of one kind of line."""

    def __init__(self, begun_s: float) -> None:
        self.begun_s = begun_s
        self.num_lines = 0
        self.num_left_out = 0
