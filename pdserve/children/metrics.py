"""What a process exports of its children."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_JOB_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


class ChildMetrics:
    """Event-loop thread only."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.children = Gauge(
            "pdserve_children",
            "Child processes that run foreign code, by the kind of job.",
            ["kind"],
            registry=registry,
        )
        self.waiting = Gauge(
            "pdserve_child_jobs_waiting", "Jobs that wait for a child.", ["kind"], registry=registry
        )
        self.refused = Counter(
            "pdserve_child_jobs_refused", "Jobs refused as too many waited.", ["kind"], registry=registry
        )
        self.kills = Counter(
            "pdserve_child_kills",
            "Children that ended in the middle of a job: time, memory, crash, cancelled (nobody waited any longer), or "
            "lost (a signal from outside).",
            ["kind", "reason"],
            registry=registry,
        )
        self.seconds = Histogram(
            "pdserve_child_job_seconds",
            "One job, from the moment it had a child.",
            ["kind"],
            registry=registry,
            buckets=_JOB_S,
        )
        self.hits = Counter(
            "pdserve_child_cache_hits",
            "Jobs whose answer was known, or in the making.",
            ["kind"],
            registry=registry,
        )
