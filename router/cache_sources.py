"""Block events of the workers' prefix caches: whose stream is open, and what is to be done about those without one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import structlog

from pdserve.block_messages import CacheEvent
from pdserve.clock import Clock
from pdserve.ids import WorkerRef
from router.member import Member
from router.metrics import RouterMetrics
from router.prefix_index import PrefixIndex

log = structlog.get_logger()

GRACE_S = (
    5.0  # a worker may be so long without a stream: it opens it after its session, and again when it breaks
)


@dataclass(frozen=True, slots=True, eq=False)
class CacheStream:
    """One stream of block events. Each has numbers of its own, so two are never mixed."""

    worker: WorkerRef


class CacheSources:
    """Event-loop thread only.

    A stream may be a moment earlier or later than its worker's session: it is known by the worker's id and epoch. Of
    several of one worker the newest counts: what an earlier one still brings, after a lost connection, is old.
    """

    def __init__(self, members: Mapping[str, Member], clock: Clock, metrics: RouterMetrics) -> None:
        self._members = members
        self._clock = clock
        self._metrics = metrics
        self._newest: dict[WorkerRef, CacheStream] = {}

    def opened(self, worker: WorkerRef) -> CacheStream:
        """A stream of this worker has begun; the first thing it tells is a snapshot."""
        source = self._newest[worker] = CacheStream(worker)
        return source

    def closed(self, source: CacheStream) -> None:
        """It has ended. If it is the newest, what was known is known no more: nobody says what is evicted."""
        if self._newest.get(source.worker) is not source:
            return
        del self._newest[source.worker]
        member = self._members.get(source.worker.id)
        if member is not None and member.ref == source.worker:
            member.cache = PrefixIndex()
            member.without_events_since_s = self._clock.now_s()

    def on_event(self, source: CacheStream, event: CacheEvent) -> bool:
        """Take in one event.

        returns  whether the worker must be asked, on this stream, for a snapshot
        """
        member = self._members.get(source.worker.id)
        if member is None or member.ref != source.worker or self._newest.get(source.worker) is not source:
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
