"""Outcomes and finishes for the tests of this folder."""

from __future__ import annotations

from pdserve.bench.drive import RequestRecord
from pdserve.request import Finished, Timings, Usage
from pdserve.sampling import FinishReason


def outcome(
    *token_s: float, code: str = "OK", sent_s: float = 0.0, num_tokens: int | None = None
) -> RequestRecord:
    """A request that got tokens at these moments, one each."""
    return RequestRecord(
        planned_s=sent_s,
        num_prompt=10,
        sent_s=sent_s,
        ended_s=max(token_s, default=sent_s),
        token_s=list(token_s),
        num_tokens=len(token_s) if num_tokens is None else num_tokens,
        num_attempts=1,
        code=code,
        timings=Timings(ttft_ms=10.0, prefill_ms=8.0, queue_ms=2.0) if code == "OK" else None,
    )


def finished(num_tokens: int) -> Finished:
    """Of choice 0."""
    return Finished(
        choice=0,
        reason=FinishReason.LENGTH,
        usage=Usage(num_prompt_tokens=10, num_cached_tokens=4, num_completion_tokens=num_tokens),
        timings=Timings(ttft_ms=5.0),
        num_attempts=2,
    )
