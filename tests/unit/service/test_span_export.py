"""What becomes of spans whose collector is well, away, slow or refuses them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from random import Random

import pytest
import structlog
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from pdserve.service.span_export import (
    BACKOFF_S,
    MAX_BATCH,
    WARN_EVERY_S,
    WELL_S,
    CollectorAway,
    CollectorRefuses,
    SpanExport,
    SpanMetrics,
    SpanThread,
)
from pdserve.tracing import Trace, TraceSpan
from tests.support.virtual_clock import VirtualClock

PLACE = Trace(1, 2, Random(1))


def spans(count: int) -> list[TraceSpan]:
    return [PLACE.span(f"s{number}", 0.0, 1.0) for number in range(count)]


class ScriptedCollector:
    """Answers in turn: an error, or how many it rejects; then it takes all. took_s: what each call takes."""

    def __init__(self, clock: VirtualClock, *answers: Exception | int, took_s: float = 0.0) -> None:
        self.batches: list[list[str]] = []
        self._clock = clock
        self._answers = list(answers)
        self._took_s = took_s

    def send(self, spans: Sequence[TraceSpan], wall_offset_ns: int) -> int:
        self._clock.advance(self._took_s)
        self.batches.append([span.name for span in spans])
        answer = self._answers.pop(0) if self._answers else 0
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        pass


class Bench:
    def __init__(self, *answers: Exception | int, took_s: float = 0.0, max_queued: int = 1_000) -> None:
        self.clock = VirtualClock()
        self.registry = CollectorRegistry()
        self.collector = ScriptedCollector(self.clock, *answers, took_s=took_s)
        self.export = SpanExport(self.collector, SpanMetrics(self.registry), self.clock, max_queued)

    def taken(self) -> float:
        return self.registry.get_sample_value("pdserve_spans_exported_total") or 0.0

    def dropped(self, reason: str) -> float:
        return self.registry.get_sample_value("pdserve_spans_dropped_total", {"reason": reason}) or 0.0


def test_all_that_waits_goes_in_batches() -> None:
    bench = Bench()
    bench.export.put(spans(MAX_BATCH + 1))
    assert bench.export.turn() == 0.0, "there is more"
    assert bench.export.turn() is None
    assert [len(batch) for batch in bench.collector.batches] == [MAX_BATCH, 1]
    assert bench.taken() == MAX_BATCH + 1 and bench.export.is_well
    assert bench.export.turn() is None and len(bench.collector.batches) == 2


def test_one_that_is_away_gets_the_same_later() -> None:
    away = [CollectorAway("UNAVAILABLE: nobody")] * 5
    bench = Bench(*away)
    bench.export.put(spans(2))
    waits = [bench.export.turn()]
    for _ in range(4):
        assert bench.export.turn() == pytest.approx(waits[-1]), "before its time nothing is tried"
        bench.clock.advance(waits[-1] or 0.0)
        bench.export.put(spans(1))
        waits.append(bench.export.turn())
    assert waits == [*BACKOFF_S, BACKOFF_S[-1]]
    assert bench.collector.batches == [["s0", "s1"]] * 5
    bench.clock.advance(BACKOFF_S[-1])
    assert bench.export.turn() == 0.0 and bench.export.turn() is None
    assert bench.taken() == 6 and not bench.dropped("full")


def test_what_waits_is_bounded_and_losses_are_counted() -> None:
    bench = Bench(CollectorAway("gone"), max_queued=100)
    bench.export.put(spans(60))
    bench.export.turn()
    assert bench.export.put(spans(100)), "beside the batch that is tried"
    assert not bench.export.put(spans(1))
    assert bench.dropped("full") == 1 and bench.export.num_waiting == 160
    bench.export.end()
    assert bench.dropped("ended") == 160


def test_what_is_refused_is_dropped() -> None:
    bench = Bench(CollectorRefuses("UNAUTHENTICATED: no key"), 2)
    bench.export.put(spans(3))
    assert bench.export.turn() is None and bench.dropped("refused") == 3
    assert not bench.export.is_well
    bench.export.put(spans(3))
    assert bench.export.turn() is None
    assert bench.dropped("refused") == 5 and bench.taken() == 1


def test_a_warning_a_minute_however_often_it_fails() -> None:
    bench = Bench(*[CollectorRefuses("UNIMPLEMENTED: what?")] * 100)
    with capture_logs() as logs:
        for _ in range(61):
            bench.export.put(spans(2))
            bench.export.turn()
            bench.clock.advance(1.0)
    assert WARN_EVERY_S == 60.0
    assert [(line["event"], line["log_level"], line["num_dropped"]) for line in logs] == [
        ("tracing.not_taken", "warning", 2),
        ("tracing.not_taken", "warning", 120),
    ]


@pytest.mark.parametrize(("took_s", "is_well"), [(WELL_S, True), (WELL_S * 1.1, False)])
def test_a_slow_one_is_not_waited_for(took_s: float, is_well: bool) -> None:
    bench = Bench(took_s=took_s)
    bench.export.put(spans(1))
    bench.export.turn()
    assert bench.export.is_well is is_well


class StandingCollector:
    """Takes the first `good` batches; then a call lasts until the collector is closed."""

    def __init__(self, good: int) -> None:
        self.stands, self.closed = threading.Event(), threading.Event()
        self.has_taken = threading.Event()
        self.taken: list[str] = []
        self._good = good

    def send(self, spans: Sequence[TraceSpan], wall_offset_ns: int) -> int:
        if not self._good:
            self.stands.set()
            self.closed.wait()
            raise CollectorAway("closed")
        self._good -= 1
        self.taken += [span.name for span in spans]
        self.has_taken.set()
        return 0

    def close(self) -> None:
        self.closed.set()


def threaded(collector: StandingCollector) -> SpanThread:
    metrics = SpanMetrics(CollectorRegistry())
    return SpanThread(SpanExport(collector, metrics, VirtualClock(), 1_000), collector, last_s=30.0)


def test_the_end_ends_a_call_that_stands() -> None:
    collector = StandingCollector(good=0)
    thread = threaded(collector)
    thread.put(spans(1))
    assert collector.stands.wait(10.0)
    thread.close()
    assert collector.closed.is_set() and not thread.runs


def test_the_end_sends_what_waits_for_one_that_is_well() -> None:
    collector = StandingCollector(good=10)
    thread = threaded(collector)
    for count in (1, 2):
        collector.has_taken.clear()
        thread.put(spans(count))
        assert collector.has_taken.wait(10.0)
    thread.put(spans(MAX_BATCH + 3))
    thread.close()
    assert len(collector.taken) == 3 + MAX_BATCH + 3


def test_a_bug_is_logged_and_loses_spans_only() -> None:
    class Broken(StandingCollector):
        def send(self, spans: Sequence[TraceSpan], wall_offset_ns: int) -> int:
            self.stands.set()
            raise RuntimeError("bug")

    structlog.reset_defaults()
    collector = Broken(good=0)
    with capture_logs() as logs:
        thread = threaded(collector)
        thread.put(spans(1))
        assert collector.stands.wait(10.0)
        thread.close()
    assert [line["event"] for line in logs] == ["tracing.crashed"]
    thread.put(spans(1))
