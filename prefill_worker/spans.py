"""The spans of an attempt at a prefill worker: queue, prefill with its chunks, hand-off."""

from __future__ import annotations

from pdserve.tracing import Attribute, Part, Trace, TraceSpan
from prefill_worker.attempt import PrefillAttempt


def spans_of(attempt: PrefillAttempt, trace: Trace, end_s: float) -> list[TraceSpan]:
    """Of one that ends now, below its router's span; the part that it ended in has the error."""
    lease = attempt.lease
    begun_s, sampled_s = attempt.begun_s or end_s, attempt.sampled_s or end_s
    parts: list[Part] = [("queue", attempt.received_s, begun_s, {"pdserve.tokens": attempt.num_tokens})]
    if attempt.begun_s:
        about: dict[str, Attribute] = {
            "pdserve.tokens": attempt.num_tokens,
            "pdserve.cached_tokens": attempt.seq.num_cached_tokens,
            "pdserve.chunks": attempt.num_moments,
        }
        parts.append(("prefill", begun_s, sampled_s, about))
    if attempt.sampled_s and not attempt.ends_here:
        about = {
            "pdserve.kv.blocks": lease.num_blocks - lease.num_skip,
            "pdserve.kv.blocks_skipped": lease.num_skip,
            "pdserve.end": attempt.how,
        }
        parts.append(("hand_off", sampled_s, end_s, about))
    common: dict[str, Attribute] = {
        "pdserve.role": "prefill",
        "pdserve.decode.worker": lease.decode_worker.id,
    }
    return trace.spans(parts, common, {"prefill": attempt.moments}, attempt.error)
