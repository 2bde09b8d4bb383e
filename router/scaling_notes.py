"""What whoever scales the cluster has told this router, kept for its status and metrics."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge

from pdserve.clock import Clock
from pdserve.status import ScalingNote, ScalingStatus

MAX_WORDS = 2000  # characters of a reason that are kept


class ScalingNotes:
    """Event-loop thread only. Soft state: a router that has begun again is told at the next look."""

    def __init__(self, registry: CollectorRegistry, clock: Clock) -> None:
        self._clock = clock
        self._last: tuple[ScalingNote, float] | None = None
        self._change: tuple[str, float] = ("", 0.0)
        self._wanted = Gauge(
            "pdserve_scaling_workers_wanted",
            "Workers that scaling wants, by role; absent where nobody scales the cluster.",
            ("role",),
            registry=registry,
        )
        self._looks = Counter(
            "pdserve_scaling_looks", "Looks at the load by whoever scales the cluster.", registry=registry
        )
        self._changes = Counter(
            "pdserve_scaling_changes", "Looks that changed the number of workers wanted.", registry=registry
        )

    def note(self, note: ScalingNote) -> None:
        """The result of a look."""
        now_s = self._clock.now_s()
        self._last = (note, now_s)
        self._wanted.labels(role="prefill").set(note.num_prefill)
        self._wanted.labels(role="decode").set(note.num_decode)
        self._looks.inc()
        if note.change:
            self._change = (note.change[:MAX_WORDS], now_s)
            self._changes.inc()

    def status(self) -> ScalingStatus | None:
        """None: nobody has told anything."""
        if self._last is None:
            return None
        (note, at_s), (last_change, changed_s), now_s = self._last, self._change, self._clock.now_s()
        return ScalingStatus(
            num_prefill=note.num_prefill,
            num_decode=note.num_decode,
            why=note.why[:MAX_WORDS],
            age_s=now_s - at_s,
            last_change=last_change,
            change_age_s=now_s - changed_s if last_change else 0.0,
        )
