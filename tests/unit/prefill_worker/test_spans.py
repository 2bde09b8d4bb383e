"""What a prefill worker's spans tell of an attempt, however it ended."""

from __future__ import annotations

from pdserve.errors import KvCorrupt
from pdserve.ids import AttemptName
from pdserve.messages import Abort
from pdserve.tracing import TraceSpan
from pdserve.worker.messages import FromSession
from tests.unit.prefill_worker.bench import PrefillBench

TRACED = AttemptName("r", 0, 1, "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
UNSAMPLED = AttemptName("r", 0, 1, "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00")


def shown(spans: list[TraceSpan]) -> list[tuple[str, str]]:
    assert {(span.trace_id, span.parent_id) for span in spans} == {
        (0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331)
    }
    return [(span.name, span.error.partition(":")[0]) for span in spans]


def test_queue_chunks_and_hand_off() -> None:
    bench = PrefillBench()
    bench.start(1, 150, skip=2, name=TRACED)
    bench.clock.advance(1.0)
    while bench.turn() == 0.0:
        bench.clock.advance(0.5)
    bench.clock.advance(2.0)
    assert not bench.spans, "its lease is still open"
    bench.close(1)
    assert shown(bench.spans) == [("queue", ""), ("prefill", ""), ("hand_off", "")]
    queue, prefill, hand_off = bench.spans
    assert queue.end_s == prefill.begin_s and prefill.end_s == hand_off.begin_s
    assert queue.end_s - queue.begin_s == 1.0 and hand_off.end_s == bench.clock.now_s()
    assert [event.attributes["pdserve.computed_tokens"] for event in prefill.events] == [64, 128, 150]
    assert prefill.attributes["pdserve.chunks"] == 3
    assert (hand_off.attributes["pdserve.kv.blocks"], hand_off.attributes["pdserve.kv.blocks_skipped"]) == (
        8,
        2,
    )
    assert hand_off.attributes["pdserve.end"] == "handed_off"


def test_the_part_that_it_failed_in_has_the_error() -> None:
    bench = PrefillBench()
    bench.start(1, 40, name=TRACED)
    bench.run()
    bench.close(1, KvCorrupt("damaged"))
    assert shown(bench.spans) == [("queue", ""), ("prefill", ""), ("hand_off", "KvCorrupt")]


def test_one_that_its_router_takes_back_in_the_queue_is_no_error() -> None:
    bench = PrefillBench()
    bench.start(1, 40, name=TRACED)
    bench.core.handle(FromSession(1, Abort(1)))
    bench.turn()
    bench.close(1)
    assert shown(bench.spans) == [("queue", "")]


def test_who_is_not_sampled_has_none() -> None:
    bench = PrefillBench()
    bench.start(1, 40, name=UNSAMPLED)
    bench.start(2, 40)
    bench.run()
    bench.close(1)
    bench.close(2)
    assert not bench.spans
