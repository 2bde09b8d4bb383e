"""Lines that somebody from outside can cause, at any rate: of each kind so many pass in so long.

Two rates. Of a refusal or of a broken peer a few lines say all. The story of requests that were let in, one line each
or a few, is told in full up to a rate that no operator reads and any disk bears.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import structlog

from pdserve.clock import Clock

WINDOW_S = 10.0
A_FEW, ALL_BUT_A_FLOOD = 20, 2_000

MOST_LINES = {
    **dict.fromkeys(
        (
            "child.ended",
            "http.failed",
            "http.too_many_connections",
            "link.accept_failed",
            "link.down",
            "link.tls_refused",
            "request.crashed",
            "request.refused",
            "rpc.failed",
            "session.bad_message",
            "session.crashed",
            "session.refused",
            "session.silent",
            "session.slow_consumer",
            "structure.crashed",
            "structure.no_library",
            "worker.refused",
        ),
        A_FEW,
    ),
    **dict.fromkeys(
        (
            "attempt.failed",
            "attempt.refused",
            "attempt.stuck",
            "grant.revoked",
            "lease.failed",
            "lease.lost",
            "lease.stuck",
            "request.finished",
            "request.stuck",
            "sequence.died",
            "sequence.preempted",
            "structure.compiled",
        ),
        ALL_BUT_A_FLOOD,
    ),
}
"""In WINDOW_S. Of no other line is there any number that a client, or a stranger, could choose."""


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
        most = MOST_LINES.get(str(name))
        if most is None:
            return event
        now_s = self._clock.now_s()
        window = self._windows.setdefault(str(name), _Window(now_s))
        if now_s - window.begun_s >= WINDOW_S:
            window.begun_s, window.num_lines = now_s, 0
        if window.num_lines >= most:
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
