"""The spans of an attempt at a decode worker: its wait for blocks, the KV's transfer or the prefill here, decoding."""

from __future__ import annotations

from decode_worker.attempt import DecodeAttempt
from kv_transfer.messages import HandedOff
from pdserve.tracing import Attribute, Part, Trace, TraceSpan


def spans_of(attempt: DecodeAttempt, trace: Trace, end_s: float) -> list[TraceSpan]:
    """Of one that ends now, below its router's span; the part that it ended in has the error."""
    admitted_s, started_s = attempt.admitted_s or end_s, attempt.started_s or end_s
    parts: list[Part] = [("wait_for_blocks", attempt.received_s, admitted_s, {})]
    if attempt.admitted_s and attempt.source is None:
        about: dict[str, Attribute] = {"pdserve.cached_tokens": attempt.seq.num_cached_tokens}
        parts.append(("prefill", admitted_s, started_s, about))
    elif attempt.admitted_s:
        begun_s = None if attempt.handed_off is None else attempt.handed_off.begun_s
        parts.append(("transfer", begun_s or admitted_s, started_s, _of_transfer(attempt.handed_off)))
    if attempt.started_s:
        about = {
            "pdserve.tokens": attempt.seq.num_generated,
            "pdserve.decode.queue_s": attempt.decode_queue_s or 0.0,
            "pdserve.decode.first_step_s": attempt.decode_step_s,
            "pdserve.end": attempt.how,
        }
        parts.append(("decode", started_s, end_s, about))
    common: dict[str, Attribute] = {"pdserve.role": "decode"}
    if attempt.source is not None:
        common["pdserve.prefill.worker"] = attempt.source.id
    moments = attempt.moments
    events = {
        "prefill": [moment for moment in moments if moment.at_s <= started_s],
        "decode": [
            moment for moment in moments if moment.at_s > started_s
        ],  # chunks of what is recomputed, too
    }
    return trace.spans(parts, common, events, attempt.error)


def _of_transfer(handed_off: HandedOff | None) -> dict[str, Attribute]:
    """Nothing where it didn't come to a hand-off."""
    if handed_off is None:
        return {}
    return {
        "pdserve.kv.bytes": handed_off.received_bytes,
        "pdserve.kv.transport": handed_off.transport,
        "pdserve.kv.transfer_s": handed_off.transfer_s,
        "pdserve.kv.exposed_s": handed_off.transfer_exposed_s,
        "pdserve.kv.commit_s": handed_off.commit_s,
    }
