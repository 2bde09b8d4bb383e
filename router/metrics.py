"""The router's metrics. Seconds and bytes; no request ids as labels."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from pdserve.errors import Code, PdserveError
from pdserve.figures import RouterFigures, Spread
from pdserve.service.receiving import count_of_refused

_LATENCY_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_COMPILE_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_GAP_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
MAX_TENANTS = 64
# What a client has caused itself.
_CLIENTS = {
    "OK",
    *(each.value for each in (Code.CANCELLED, Code.INVALID_ARGUMENT, Code.NOT_FOUND, Code.UNAUTHENTICATED)),
}


class TenantMetrics:
    """By tenant of the API keys; those beyond MAX_TENANTS count as one. Nothing where there are no keys."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, what: str, label: str) -> Counter:
            return Counter(name, what, ("tenant", label), registry=registry)

        self._requests = counter("pdserve_tenant_requests", "Requests ended, by tenant and status.", "status")
        self._tokens = counter(
            "pdserve_tenant_tokens", "Tokens by tenant: of prompts, and computed for answers.", "kind"
        )
        self._limited = counter(
            "pdserve_tenant_limited", "Calls refused by a limit of their key, by tenant and limit.", "limit"
        )
        self._shown: set[str] = set()

    def ended(self, tenant: str, status: str, num_prompt_tokens: int, num_completion_tokens: int) -> None:
        """A request has ended."""
        if tenant:
            shown = self._label(tenant)
            self._requests.labels(tenant=shown, status=status).inc()
            self._tokens.labels(tenant=shown, kind="prompt").inc(num_prompt_tokens)
            self._tokens.labels(tenant=shown, kind="completion").inc(num_completion_tokens)

    def limited(self, tenant: str, limit: str) -> None:
        """A call was refused."""
        self._limited.labels(tenant=self._label(tenant), limit=limit).inc()

    def _label(self, tenant: str) -> str:
        if tenant not in self._shown and len(self._shown) >= MAX_TENANTS:
            return "others"
        self._shown.add(tenant)
        return tenant


class RouterMetrics:
    """All of them, registered where `registry` says. Event-loop thread only."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, what: str, *labels: str) -> Counter:
            return Counter(name, what, labels, registry=registry)

        def gauge(name: str, what: str, *labels: str) -> Gauge:
            return Gauge(name, what, labels, registry=registry)

        def histogram(name: str, what: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, what, registry=registry, buckets=buckets)

        self.registry = registry
        self.requests = counter("pdserve_requests", "Requests ended, by status.", "status")
        self.calls_refused = counter(
            "pdserve_calls_refused", "Calls without a valid API key, or over its limits, by status.", "status"
        )
        self.tenants = TenantMetrics(registry)
        self.requests_running = gauge("pdserve_requests_running", "Requests accepted and not ended.")
        self.queue_length = gauge("pdserve_queue_requests", "Attempts waiting for a pair.")
        self.queue_places = gauge(
            "pdserve_queue_places",
            "Places taken of router.max_queued_requests: arrived, and not yet placed on a pair.",
        )
        self.queue_tokens = gauge("pdserve_queue_tokens", "Prompt tokens of attempts waiting for a pair.")
        self.refused = counter(
            "pdserve_queue_refused",
            "Calls refused at once: no place was free, or they couldn't make their deadline.",
            "reason",
        )
        self.too_large = counter(
            "pdserve_requests_too_large", "Requests refused unread, by what of them was too large.", "what"
        )
        self.reading_bytes = gauge(
            "pdserve_reading_bytes",
            "Bytes of requests that are parsed, rendered or tokenized, or wait for it.",
        )
        self.reading_refused = counter(
            "pdserve_reading_refused",
            "Requests refused as more would be read at once than router.max_reading_bytes.",
        )
        self.receiving_refused = count_of_refused(registry)
        self.shared_calls = gauge("pdserve_shared_calls", "GenerateMany calls that are open.")
        self.estimate_error_s = histogram(
            "pdserve_placement_error_seconds",
            "Difference between a placement's estimate of the time to its first token and that time.",
            _LATENCY_S,
        )
        self.attempts = counter("pdserve_attempts", "Attempts ended, by how ('ok' or the error).", "reason")
        self.phases = gauge("pdserve_attempts_running", "Attempts placed and not ended, by phase.", "phase")
        self.replays_running = gauge("pdserve_replays_running", "Replays placed and not yet running.")
        self.prompt_tokens = counter("pdserve_prompt_tokens", "Prompt tokens of requests.")
        self.cached_tokens = counter(
            "pdserve_prompt_tokens_cached", "Prompt tokens of requests that were prefix cache hits."
        )
        self.tokens = counter(
            "pdserve_completion_tokens",
            "Tokens of all choices, those of best_of that are not given out among them.",
        )
        self.structures_compiled = counter(
            "pdserve_structures_compiled", "Structures compiled, or tried, by kind.", "kind"
        )
        self.structure_compile_s = histogram(
            "pdserve_structure_compile_seconds", "What compiling a structure took.", _COMPILE_S
        )
        self.structure_hits = counter(
            "pdserve_structure_cache_hits", "Requests whose structure was compiled already, or just being so."
        )
        self.structures_refused = counter(
            "pdserve_structures_refused", "Requests whose structure can't be compiled.", "kind"
        )
        self.overrun_tokens = counter(
            "pdserve_overrun_tokens", "Tokens computed behind a stop string, not given out."
        )
        self.dropped_messages = counter(
            "pdserve_session_dropped", "Messages of workers under a handle that is closed.", "message"
        )
        self.unknown_messages = counter(
            "pdserve_unknown_messages",
            "Messages of a later version of the wire that were skipped (kind), or in part (field).",
            "channel",
            "what",
        )
        self.workers = gauge("pdserve_workers", "Workers that have joined.", "role")
        self.workers_left = counter("pdserve_workers_left", "Ends of workers' sessions.")
        self.session_crashes = counter(
            "pdserve_session_crashes", "Workers' sessions that a bug of this router ended."
        )
        self.books_wrong = counter(
            "pdserve_books_wrong", "Times that books didn't add up; the worker's session was ended.", "book"
        )
        self.workers_refused = counter("pdserve_workers_refused", "Workers turned away, by reason.", "reason")
        self.serving = gauge(
            "pdserve_serving", "1 while a request would be served: by a pair, or by a worker alone."
        )
        self.pairs_up = gauge("pdserve_pairs_up", "Pairs that can take a request.")
        self.without_cache_events = gauge(
            "pdserve_workers_without_cache_events",
            "Workers that tell no block events: their prefix hits are predicted.",
        )
        self.cache_event_gaps = counter(
            "pdserve_cache_event_gaps",
            "Times that a worker left out block events, since they lagged, and told its whole cache again.",
        )
        self.kv_bytes = counter("pdserve_kv_received_bytes", "KV bytes of hand-offs.")
        self.kv_transfer_s = counter("pdserve_kv_transfer_seconds", "Time in which KV of hand-offs arrived.")
        self.corrupt = counter("pdserve_kv_corrupt", "Attempts ended by a wrong checksum.", "prefill_worker")
        self.ttft_s = histogram("pdserve_ttft_seconds", "Received to first token written.", _LATENCY_S)
        self.itl_s = histogram("pdserve_itl_seconds", "Gap between two tokens.", _GAP_S)
        self.queue_s = histogram("pdserve_queue_seconds", "Received to credit held.", _LATENCY_S)

    def show_phases(self, num_by_phase: Mapping[str, int]) -> None:
        """Of all phases."""
        for phase, num_attempts in num_by_phase.items():
            self.phases.labels(phase=phase).set(num_attempts)

    def count_call_refused(self, error: PdserveError, *, is_request: bool) -> None:
        """A call had no valid key, or was over its key's limits."""
        status = error.code.value
        self.calls_refused.labels(status=status).inc()
        if is_request:
            self.requests.labels(status=status).inc()

    def count_unknown(self, channel: str, what: str) -> None:
        """One more message of a later version."""
        self.unknown_messages.labels(channel=channel, what=what).inc()

    def figures(self, now_s: float) -> RouterFigures:
        """What has been counted until now, for GetStatus."""
        ended = {labels["status"]: round(value) for labels, value in _samples(self.requests, "_total")}
        refused = ended.get(Code.RESOURCE_EXHAUSTED.value, 0)
        return RouterFigures(
            at_s=now_s,
            num_requests_ended=sum(ended.values()),
            num_requests_refused=refused,
            num_requests_failed=sum(num for status, num in ended.items() if status not in _CLIENTS) - refused,
            num_prompt_tokens=_count(self.prompt_tokens),
            num_cached_tokens=_count(self.cached_tokens),
            num_completion_tokens=_count(self.tokens),
            num_kv_bytes=_count(self.kv_bytes),
            kv_transfer_s=next(value for _, value in _samples(self.kv_transfer_s, "_total")),
            ttft=_spread(self.ttft_s),
            gap=_spread(self.itl_s),
            queued=_spread(self.queue_s),
        )


def _samples(metric: Counter | Histogram, ending: str) -> Iterator[tuple[dict[str, str], float]]:
    for family in metric.collect():
        for sample in family.samples:
            if sample.name.endswith(ending):
                yield sample.labels, sample.value


def _count(counter: Counter) -> int:
    return sum(round(value) for _, value in _samples(counter, "_total"))


def _spread(histogram: Histogram) -> Spread:
    buckets = [(float(labels["le"]), round(value)) for labels, value in _samples(histogram, "_bucket")]
    counts = [after - before for before, after in itertools.pairwise((0, *(count for _, count in buckets)))]
    return Spread(tuple(bound for bound, _ in buckets if bound < math.inf), tuple(counts))
