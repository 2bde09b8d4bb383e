"""The one canonical log line of a request, and its metrics at the end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import structlog

from pdserve.errors import Code, InvalidRequest, PdserveError
from pdserve.fields import plain_id
from router.asked import Asked
from router.choice_run import ChoiceRun
from router.metrics import RouterMetrics

log = structlog.get_logger()

_PARTS = (
    "ttft",
    "queue",
    "reserve",
    "dispatch",
    "prefill_queue",
    "prefill",
    "relay",
    "rest",
    "first_gap",
    "itl_p50",
    "itl_p99",
)


@contextmanager
def refusals_told(request_id: str, metrics: RouterMetrics) -> Iterator[None]:
    """Counts and logs an error that ends a request before it began, and passes it on.

    request_id  as it came: one that may be what is wrong isn't repeated in the log
    """
    try:
        yield
    except PdserveError as error:
        status = error.code.value
        metrics.requests.labels(status=status).inc()
        count_too_large(error, metrics)
        shown = "" if plain_id(request_id) else request_id
        log.info("request.refused", request_id=shown, status=status, error=str(error))
        raise
    except asyncio.CancelledError:
        metrics.requests.labels(status=Code.CANCELLED.value).inc()
        raise


def tell_unread(error: PdserveError, metrics: RouterMetrics) -> None:
    """A message was refused before anybody knew of what request."""
    count_too_large(error, metrics)
    log.info("request.refused", request_id="", status=error.code.value, error=str(error))


@contextmanager
def large_ones_counted(metrics: RouterMetrics) -> Iterator[None]:
    """Of a call that is no request: only that it was refused for its size."""
    try:
        yield
    except PdserveError as error:
        count_too_large(error, metrics)
        raise


def count_too_large(error: PdserveError | None, metrics: RouterMetrics) -> None:
    """Of a request that ends with this."""
    if isinstance(error, InvalidRequest) and error.too_large:
        metrics.too_large.labels(what=error.too_large).inc()


def log_finished(
    asked: Asked,
    num_prompt_tokens: int,
    runs: Sequence[ChoiceRun],
    error: PdserveError | None,
    metrics: RouterMetrics,
    *,
    explain: bool,
) -> None:
    """Called once for every request that began, however it ended.

    runs     of its choices; none if it ended before there were any
    explain  say also why each last placement was chosen
    """
    now_s = asked.clock.now_s()
    status = "OK" if error is None else error.code.value
    count_too_large(error, metrics)
    choices = [run.choice for run in runs]
    num_completion_tokens = sum(choice.num_generated for choice in choices)
    metrics.requests.labels(status=status).inc()
    metrics.tenants.ended(asked.caller.tenant, status, num_prompt_tokens, num_completion_tokens)
    for choice in choices:
        if choice.times.ttft_s is not None and choice.num_generated:
            metrics.ttft_s.observe(choice.times.ttft_s)
        if choice.times.queue_s is not None:
            metrics.queue_s.observe(choice.times.queue_s)
    fields: dict[str, object] = {
        "request_id": asked.request_id,
        "status": status,
        "error": "" if error is None else str(error),
        "num_prompt_tokens": num_prompt_tokens,
        "num_completion_tokens": num_completion_tokens,
        "took_s": round(now_s - asked.received_s, 4),
    }
    if asked.caller.tenant:
        fields["tenant"] = asked.caller.tenant
    if traceparent := asked.traceparent or ("" if asked.place is None else asked.place.traceparent):
        fields["traceparent"] = traceparent
    if choices:
        first, structure = choices[0], asked.request.sampling.structure
        timings = first.times.timings(now_s)
        prefill, decode = first.pair or ("", "")
        fields |= {
            "num_choices": len(choices),
            "structure": "" if structure is None else structure.kind.value,
            "num_cached_tokens": first.num_cached_tokens or 0,
            "reasons": [choice.reason.value if choice.reason else "" for choice in choices],
            "attempts": sum(run.num_attempts for run in runs),
            "strikes": sum(run.num_strikes for run in runs),
            "prefill": prefill,
            "decode": decode,
            "transport": first.transport,
            "kv_bytes": first.kv_bytes,
        } | {f"{part}_s": round(getattr(timings, f"{part}_ms") / 1e3, 6) for part in _PARTS}
    if explain:
        fields["explain"] = [
            run.explained.lines() if run.explained is not None else run.why_waiting for run in runs
        ]
    log.info("request.finished", **fields)
