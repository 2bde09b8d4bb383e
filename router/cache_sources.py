"""Block events of the workers' prefix caches: whose stream is open, and what is to be done about those without one."""

from __future__ import annotations

from collections.abc import Mapping

import structlog

from pdserve.clock import Clock
from pdserve.ids import WorkerRef
from pdserve.messages import CacheEvent
from router.member import Member
from router.metrics import RouterMetrics
from router.prefix_index import PrefixIndex

log = structlog.get_logger()

GRACE_S = (
    5.0  # a worker may be so long without a stream: it opens it after its session, and again when it breaks
)


class CacheSources:
    """Event-loop thread only.

    A stream may be a moment earlier or later than its worker's session: it is known by the worker's id and epoch.
    """

    def __init__(self, members: Mapping[str, Member], clock: Clock, metrics: RouterMetrics) -> None:
        self._members = members
        self._clock = clock
        self._metrics = metrics
        self._open: dict[WorkerRef, int] = {}  # streams open for it

    def opened(self, worker: WorkerRef) -> None:
        """A stream of this worker has begun; the first thing it tells is a snapshot."""
        self._open[worker] = self._open.get(worker, 0) + 1

    def closed(self, worker: WorkerRef) -> None:
        """One has ended. With the last one what was known is known no more: nobody says what is evicted."""
        self._open[worker] -= 1
        if self._open[worker]:
            return
        del self._open[worker]
        member = self._members.get(worker.id)
        if member is not None and member.ref == worker:
            member.cache = PrefixIndex()
            member.without_events_since_s = self._clock.now_s()

    def on_event(self, worker: WorkerRef, event: CacheEvent) -> bool:
        """Take in one event.

        returns  whether the worker must be asked for a snapshot
        """
        member = self._members.get(worker.id)
        if member is None or member.ref != worker:
            return False
        ask = member.cache.apply(event)
        if member.cache.has_begun:
            member.without_events_since_s = None
        if ask:
            self._metrics.cache_event_gaps.inc()
        return ask

    def tick(self) -> None:
        """Once a heartbeat: count, and name once, the workers whose prefix hits are only predicted."""
        now_s = self._clock.now_s()
        count = 0
        for member in self._members.values():
            since_s = member.without_events_since_s
            if since_s is None or now_s - since_s < GRACE_S:
                continue
            count += 1
            if not member.without_events_told:
                member.without_events_told = True
                log.warning("cache_events.missing", worker=member.id, effect="its prefix hits are predicted")
        self._metrics.without_cache_events.set(count)
