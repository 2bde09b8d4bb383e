"""The metrics of an HTTP door."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge


class HttpMetrics:
    """Registered where `registry` says. Event-loop thread only."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.requests = Counter(
            "pdserve_http_requests",
            "HTTP requests answered, by endpoint and status.",
            ("endpoint", "status"),
            registry=registry,
        )
        self.open_streams = Gauge(
            "pdserve_http_streams", "Streams of events that are being written.", registry=registry
        )
        self.disconnects = Counter(
            "pdserve_http_disconnects",
            "HTTP clients that hung up before their answer was whole, by endpoint.",
            ("endpoint",),
            registry=registry,
        )
