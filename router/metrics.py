"""The router's metrics. Seconds and bytes; no request ids as labels."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_LATENCY_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_COMPILE_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_GAP_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)


class RouterMetrics:
    """All of them, registered where `registry` says. Event-loop thread only."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.requests = Counter(
            "pdserve_requests", "Requests ended, by status.", ["status"], registry=registry
        )
        self.requests_running = Gauge(
            "pdserve_requests_running", "Requests accepted and not ended.", registry=registry
        )
        self.queue_length = Gauge("pdserve_queue_requests", "Attempts waiting for a pair.", registry=registry)
        self.queue_tokens = Gauge("pdserve_queue_tokens", "Prompt tokens of these.", registry=registry)
        self.refused = Counter(
            "pdserve_queue_refused",
            "Requests refused at once: the queue was full, or they couldn't make their deadline.",
            ["reason"],
            registry=registry,
        )
        self.estimate_error_s = Histogram(
            "pdserve_placement_error_seconds",
            "Difference between a placement's estimate of the time to its first token and that time.",
            registry=registry,
            buckets=_LATENCY_S,
        )
        self.attempts = Counter(
            "pdserve_attempts", "Attempts ended, by how ('ok' or the error).", ["reason"], registry=registry
        )
        self.replays_running = Gauge(
            "pdserve_replays_running", "Replays placed and not yet running.", registry=registry
        )
        self.prompt_tokens = Counter("pdserve_prompt_tokens", "Prompt tokens of requests.", registry=registry)
        self.cached_tokens = Counter(
            "pdserve_prompt_tokens_cached", "Of these, those that were prefix cache hits.", registry=registry
        )
        self.tokens = Counter(
            "pdserve_completion_tokens",
            "Tokens of all choices, those of best_of that are not given out among them.",
            registry=registry,
        )
        self.structures_compiled = Counter(
            "pdserve_structures_compiled",
            "Structures compiled, or tried, by kind.",
            ["kind"],
            registry=registry,
        )
        self.structure_compile_s = Histogram(
            "pdserve_structure_compile_seconds", "What that took.", registry=registry, buckets=_COMPILE_S
        )
        self.structure_hits = Counter(
            "pdserve_structure_cache_hits",
            "Requests whose structure was compiled already, or just being so.",
            registry=registry,
        )
        self.structures_refused = Counter(
            "pdserve_structures_refused",
            "Requests whose structure can't be compiled.",
            ["kind"],
            registry=registry,
        )
        self.overrun_tokens = Counter(
            "pdserve_overrun_tokens",
            "Tokens computed behind a stop string, not given out.",
            registry=registry,
        )
        self.dropped_messages = Counter(
            "pdserve_session_dropped",
            "Messages of workers under a handle that is closed.",
            ["message"],
            registry=registry,
        )
        self.unknown_messages = Counter(
            "pdserve_unknown_messages",
            "Messages of a later version of the wire that were skipped (kind), or in part (field).",
            ["channel", "what"],
            registry=registry,
        )
        self.workers = Gauge("pdserve_workers", "Workers that have joined.", ["role"], registry=registry)
        self.workers_left = Counter("pdserve_workers_left", "Ends of workers' sessions.", registry=registry)
        self.workers_refused = Counter(
            "pdserve_workers_refused", "Workers turned away, by reason.", ["reason"], registry=registry
        )
        self.pairs_up = Gauge("pdserve_pairs_up", "Pairs that can take a request.", registry=registry)
        self.without_cache_events = Gauge(
            "pdserve_workers_without_cache_events",
            "Workers without a stream of block events: their prefix hits are predicted.",
            registry=registry,
        )
        self.cache_event_gaps = Counter(
            "pdserve_cache_event_gaps", "Gaps in block events.", registry=registry
        )
        self.kv_bytes = Counter("pdserve_kv_received_bytes", "KV bytes of hand-offs.", registry=registry)
        self.kv_transfer_s = Counter(
            "pdserve_kv_transfer_seconds", "Time in which KV of hand-offs arrived.", registry=registry
        )
        self.corrupt = Counter(
            "pdserve_kv_corrupt",
            "Attempts ended by a wrong checksum.",
            ["prefill_worker"],
            registry=registry,
        )
        self.ttft_s = Histogram(
            "pdserve_ttft_seconds", "Received to first token written.", registry=registry, buckets=_LATENCY_S
        )
        self.itl_s = Histogram(
            "pdserve_itl_seconds", "Gap between two tokens.", registry=registry, buckets=_GAP_S
        )
        self.queue_s = Histogram(
            "pdserve_queue_seconds", "Received to credit held.", registry=registry, buckets=_LATENCY_S
        )
        self.loop_lag_s = Histogram(
            "pdserve_loop_lag_seconds",
            "How late the router's own heartbeat came: so long something held up its event loop.",
            registry=registry,
            buckets=_GAP_S,
        )

    def count_unknown(self, channel: str, what: str) -> None:
        """One more message of a later version."""
        self.unknown_messages.labels(channel=channel, what=what).inc()
