"""The one canonical log line of a request, and its metrics at the end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import structlog

from pdserve.errors import PdserveError
from pdserve.fields import plain_id
from pdserve.request import GenerateRequest
from router.choice import Choice
from router.choice_run import ChoiceRun
from router.metrics import RouterMetrics

log = structlog.get_logger()


class EndedRequest(Protocol):
    """What the summary reads."""

    request: GenerateRequest
    request_id: str
    traceparent: str
    received_s: float
    prompt_ids: tuple[int, ...]
    choices: list[Choice]
    runs: list[ChoiceRun]


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
        shown = "" if plain_id(request_id) else request_id
        log.info("request.refused", request_id=shown, status=status, error=str(error))
        raise


def log_finished(
    ended: EndedRequest,
    error: PdserveError | None,
    now_s: float,
    metrics: RouterMetrics,
    *,
    explain: bool,
) -> None:
    """Called once for every request that began, however it ended.

    explain  say also why each last placement was chosen
    """
    status = "OK" if error is None else error.code.value
    metrics.requests.labels(status=status).inc()
    for choice in ended.choices:
        if choice.times.ttft_s is not None:
            metrics.ttft_s.observe(choice.times.ttft_s)
        if choice.times.queue_s is not None:
            metrics.queue_s.observe(choice.times.queue_s)
    fields: dict[str, object] = {
        "request_id": ended.request_id,
        "status": status,
        "error": "" if error is None else str(error),
        "num_prompt_tokens": len(ended.prompt_ids),
        "num_completion_tokens": sum(choice.num_generated for choice in ended.choices),
        "took_s": round(now_s - ended.received_s, 4),
    }
    if ended.traceparent:
        fields["traceparent"] = ended.traceparent
    structure = ended.request.sampling.structure
    if ended.choices:
        first = ended.choices[0]
        timings = first.times.timings(now_s)
        fields |= {
            "num_choices": len(ended.choices),
            "structure": "" if structure is None else structure.kind.value,
            "num_cached_tokens": first.num_cached_tokens or 0,
            "reasons": [choice.reason.value if choice.reason else "" for choice in ended.choices],
            "attempts": sum(run.tries.num_attempts for run in ended.runs),
            "strikes": sum(run.tries.num_strikes for run in ended.runs),
            "prefill": first.prefill_worker,
            "decode": first.decode_worker,
            "transport": first.transport,
            "kv_bytes": first.kv_bytes,
        }
        for name in (
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
        ):
            fields[f"{name}_s"] = round(getattr(timings, f"{name}_ms") / 1e3, 6)
    if explain:
        fields["explain"] = [
            run.explained.lines() if run.explained is not None else run.why_waiting for run in ended.runs
        ]
    log.info("request.finished", **fields)
