"""Takes spans to a collector on a thread of its own: whatever the collector does, nobody waits for it.

put ─► queue (bounded) ─► batch ─► send ─┬─ taken
                             ▲           ├─ away: the same batch again, after a back-off
                             └───────────┴─ refused: dropped
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import structlog
from prometheus_client import CollectorRegistry, Counter

from pdserve.clock import Clock
from pdserve.tracing import TraceSpan

log = structlog.get_logger()

MAX_BATCH = 512
GATHER_S = 0.2  # what comes within it goes in one call
BACKOFF_S = (1.0, 2.0, 5.0, 10.0)
WARN_EVERY_S = 60.0
WELL_S = 0.05  # a collector that took the last batch within it is waited for at the end,
LAST_S = 0.1  # so long at most


class CollectorAway(Exception):
    """It may take the same spans later."""


class CollectorRefuses(Exception):
    """It will never take these."""


class Collector(Protocol):
    """Where spans go."""

    def send(self, spans: Sequence[TraceSpan], wall_offset_ns: int) -> int:
        """Returns how many it rejected. Raises CollectorAway, CollectorRefuses; blocks for seconds at most."""
        ...

    def close(self) -> None:
        """Ends a `send` in progress at once; any thread."""
        ...


class SpanMetrics:
    """There with tracing or without. Any thread."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.exported = Counter(
            "pdserve_spans_exported", "Spans that the collector of traces has taken.", registry=registry
        )
        self.dropped = Counter(
            "pdserve_spans_dropped",
            "Spans lost: the queue was full, the collector refused them, or the process ended.",
            ("reason",),
            registry=registry,
        )


class SpanExport:
    """What the thread does, in turns; `put` is called by others.

    max_queued  spans that wait, beside the batch that is being sent
    """

    def __init__(self, collector: Collector, metrics: SpanMetrics, clock: Clock, max_queued: int) -> None:
        self._collector = collector
        self._metrics = metrics
        self._clock = clock
        self._max_queued = max_queued
        self._queue: deque[TraceSpan] = deque()
        self._batch: tuple[TraceSpan, ...] = ()
        self._num_failed = 0  # calls in a row
        self._due_s = 0.0
        self._warned_s: float | None = None
        self._num_lost = 0  # since the last warning
        self.is_well = False  # the last batch was taken at once

    def put(self, spans: Sequence[TraceSpan]) -> bool:
        """Any thread; never waits. Returns whether there was room."""
        if len(self._queue) + len(spans) > self._max_queued:
            self._lose(len(spans), "full")
            return False
        self._queue.extend(spans)
        return True

    @property
    def num_waiting(self) -> int:
        """Spans that aren't taken yet."""
        return len(self._batch) + len(self._queue)

    def turn(self) -> float | None:
        """Send one batch if it is due. Returns the seconds until the next turn; None = when there are spans."""
        now_s = self._clock.now_s()
        if now_s < self._due_s:
            return self._due_s - now_s
        if not self._batch:
            self._batch = tuple(self._queue.popleft() for _ in range(min(MAX_BATCH, len(self._queue))))
            if not self._batch:
                return None
        self._send(now_s)
        if self._num_failed:
            wait_s = BACKOFF_S[min(self._num_failed, len(BACKOFF_S)) - 1]
            self._due_s = self._clock.now_s() + wait_s
            return wait_s
        return 0.0 if self._queue else None

    def _send(self, now_s: float) -> None:
        batch = self._batch
        self.is_well = False
        try:
            num_rejected = self._collector.send(batch, self._clock.wall_ns() - round(now_s * 1e9))
        except CollectorAway as error:
            self._num_failed += 1
            self._warn("away", str(error))
            return
        except CollectorRefuses as error:
            self._batch, self._num_failed = (), 0
            self._lose(len(batch), "refused")
            self._warn("refused", str(error))
            return
        self._batch, self._num_failed = (), 0
        self.is_well = self._clock.now_s() - now_s <= WELL_S
        self._metrics.exported.inc(len(batch) - num_rejected)
        if num_rejected:
            self._lose(num_rejected, "refused")
            self._warn("refused", "some of the spans")

    def _lose(self, num_spans: int, reason: str) -> None:
        self._num_lost += num_spans
        self._metrics.dropped.labels(reason=reason).inc(num_spans)

    def _warn(self, state: str, reason: str) -> None:
        """Once a minute, whatever happens."""
        now_s = self._clock.now_s()
        if self._warned_s is not None and now_s - self._warned_s < WARN_EVERY_S:
            return
        self._warned_s, num_lost, self._num_lost = now_s, self._num_lost, 0
        log.warning(
            "tracing.not_taken",
            collector=state,
            reason=reason,
            num_dropped=num_lost,
            num_waiting=self.num_waiting,
        )

    def end(self) -> None:
        """What still waits is lost."""
        if self.num_waiting:
            self._metrics.dropped.labels(reason="ended").inc(self.num_waiting)


class SpanThread:
    """Runs a SpanExport until it is closed. last_s: how long a collector that is well is waited for then."""

    def __init__(self, export: SpanExport, collector: Collector, last_s: float = LAST_S) -> None:
        self._last_s = last_s
        self._export = export
        self._collector = collector
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="spans", daemon=True)
        self._thread.start()

    def put(self, spans: Sequence[TraceSpan]) -> None:
        """Any thread; never waits."""
        if self._export.put(spans):
            self._wake.set()

    @property
    def runs(self) -> bool:
        """Whether the thread hasn't ended."""
        return self._thread.is_alive()

    def close(self) -> None:
        """At the end of the process: what waits is sent if the collector is well; for any other nobody waits."""
        self._closing.set()
        self._wake.set()
        if self._export.is_well:
            self._thread.join(self._last_s)
        self._collector.close()
        self._thread.join(self._last_s)  # its call ends at once; the interpreter shouldn't end around it
        self._export.end()

    def _run(self) -> None:
        export = self._export
        wait_s: float | None = None
        try:
            while not self._closing.is_set():
                self._wake.wait(wait_s)
                self._wake.clear()
                if wait_s != 0.0:  # else a whole batch waits already
                    self._closing.wait(GATHER_S)
                wait_s = export.turn()
            while export.is_well and export.num_waiting:
                export.turn()
        except Exception:  # the thread's outermost frame
            log.exception("tracing.crashed")
