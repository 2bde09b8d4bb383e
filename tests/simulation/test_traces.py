"""Traced and untraced, a cluster under faults does the same; and its spans hang together whatever happens."""

from __future__ import annotations

import random
import re
from collections import defaultdict

import pytest

from pdserve.tracing import SpanKind, Tracer, TraceSpan
from tests.simulation.run import run_scenario
from tests.simulation.scenario import draw_scenario

SEEDS = [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 30))]
_PARENT = r"\b00-[0-9a-f]{32}-[0-9a-f]{16}-01\b"
TRACEPARENT = re.compile(rf", 'traceparent': '{_PARENT}'|( traceparent=)?{_PARENT}")
"""As logs and messages write it."""


@pytest.mark.parametrize("seed", SEEDS)
def test_tracing_changes_nothing_and_spans_hang_together(seed: int) -> None:
    spans: list[TraceSpan] = []
    plain = run_scenario(draw_scenario(seed))
    traced = run_scenario(draw_scenario(seed), tracer=Tracer(spans.extend, random.Random(seed), 1.0))
    assert not traced.violations, traced.violations
    assert TRACEPARENT.sub("", str(traced.tape)) == str(plain.tape)
    assert len({span.span_id for span in spans}) == len(spans)
    traces: dict[int, list[TraceSpan]] = defaultdict(list)
    for span in spans:
        assert span.begin_s <= span.end_s, span
        traces[span.trace_id].append(span)
    num_whole = 0
    for of_trace in traces.values():
        roots = [span for span in of_trace if span.parent_id == 0]
        if not roots:
            continue  # its router was killed: workers' spans are all there is
        num_whole += 1
        [request] = roots
        assert request.kind is SpanKind.SERVER
        known = {span.span_id for span in of_trace}
        assert all(span.parent_id in known for span in of_trace if span is not request)
        assert all(link in known for span in of_trace for link in span.links)
        attempts = [span for span in of_trace if span.name == "attempt"]
        for choice in {span.attributes["pdserve.choice"] for span in attempts}:
            own = [span for span in attempts if span.attributes["pdserve.choice"] == choice]
            assert [span.links for span in own] == [(), *((before.span_id,) for before in own[:-1])]
    assert num_whole, "some requests ended at their routers"
