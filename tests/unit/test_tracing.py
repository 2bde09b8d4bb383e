"""Which requests are sampled, what the next process is told, and how a worker's parts become spans."""

from __future__ import annotations

from random import Random

import pytest

from pdserve.ids import AttemptName
from pdserve.tracing import SpanEvent, Trace, Tracer, named_below

ABOVE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-{}"


def tracer(ratio: float) -> Tracer:
    return Tracer(lambda spans: None, Random(1), ratio)


@pytest.mark.parametrize(("flags", "is_sampled"), [("01", True), ("00", False), ("03", True), ("02", False)])
def test_a_client_decides_for_its_own_trace(flags: str, is_sampled: bool) -> None:
    for ratio in (0.0, 1.0):
        above = tracer(ratio).begin(ABOVE.format(flags))
        assert (above is not None) is is_sampled
        if above is not None:
            assert above.trace_id == 0x0AF7651916CD43DD8448EB211C80319C
            assert above.span_id == 0xB7AD6B7169203331


def test_a_version_of_the_future_is_read_as_far_as_it_is_known() -> None:
    assert (
        tracer(0.0).begin(ABOVE.format("01").replace("00-", "cc-", 1) + "-what-the.future.adds") is not None
    )


@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.5, 1.0])
def test_of_the_others_the_ratio_is_sampled(ratio: float) -> None:
    source = tracer(ratio)
    begun = [source.begin("") for _ in range(4_000)]
    assert sum(trace is not None for trace in begun) == pytest.approx(ratio * 4_000, abs=120)
    ids = {trace.trace_id for trace in begun if trace is not None}
    assert len(ids) == sum(trace is not None for trace in begun) and 0 not in ids
    if ratio in (0.0, 1.0):
        assert len(ids) == ratio * 4_000, "never, or always"


def test_nothing_is_sampled_where_tracing_is_off() -> None:
    off = Tracer.off()
    assert off.begin("") is off.begin(ABOVE.format("01")) is off.join(ABOVE.format("01")) is None


def test_workers_begin_no_traces() -> None:
    assert tracer(1.0).join("") is None


def test_what_a_worker_is_told_is_the_span_above_it() -> None:
    source = tracer(1.0)
    place = Trace(7, 8, Random(1)).below()
    name = named_below(AttemptName("r", 0, 1, ABOVE.format("01")), place)
    assert name.traceparent == place.traceparent != ABOVE.format("01")
    joined = source.join(name.traceparent)
    assert joined is not None and (joined.trace_id, joined.span_id) == (7, place.span_id)
    assert named_below(name, None) is name


def test_a_span_is_below_its_place() -> None:
    above = Trace(7, 8, Random(1))
    own = above.below()
    span = above.span("attempt", 2.0, 1.0, place=own)
    assert (span.trace_id, span.span_id, span.parent_id) == (7, own.span_id, 8)
    assert (span.begin_s, span.end_s) == (2.0, 2.0), "never back in time"
    assert own.span("reserve", 1.0, 2.0).parent_id == span.span_id


def test_parts_have_their_events_and_the_last_has_the_error() -> None:
    chunks = [SpanEvent("chunk", at_s) for at_s in (1.5, 2.0)]
    spans = Trace(7, 8, Random(1)).spans(
        [("queue", 0.0, 1.0, {}), ("prefill", 1.0, 2.0, {"n": 1}), ("hand_off", 2.0, 3.0, {})],
        {"role": "prefill"},
        {"prefill": chunks},
        "KvCorrupt: damaged",
    )
    assert [span.events for span in spans] == [(), chunks, ()]
    assert [span.error for span in spans] == ["", "", "KvCorrupt: damaged"]
    assert spans[1].attributes == {"role": "prefill", "n": 1}
