"""What a decode worker's spans tell of an attempt, however it ended."""

from __future__ import annotations

from pdserve.errors import LinkLost
from pdserve.ids import AttemptName
from pdserve.messages import Abort
from pdserve.tracing import TraceSpan
from pdserve.worker.messages import FromSession
from tests.unit.decode_worker.bench import DecodeBench

TRACED = AttemptName("r", 0, 1, "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")


def shown(spans: list[TraceSpan]) -> list[tuple[str, str]]:
    assert {(span.trace_id, span.parent_id) for span in spans} == {
        (0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331)
    }
    return [(span.name, span.error.partition(":")[0]) for span in spans]


def test_a_hand_off_and_what_follows() -> None:
    bench = DecodeBench()
    bench.start(1, 40, name=TRACED)
    bench.turn()
    bench.clock.advance(1.0)
    bench.hand_off(1)
    while bench.turn() == 0.0:
        bench.clock.advance(0.5)
    assert shown(bench.spans) == [("wait_for_blocks", ""), ("transfer", ""), ("decode", "")]
    wait, transfer, decode = bench.spans
    assert wait.end_s == transfer.begin_s and transfer.end_s == decode.begin_s
    assert transfer.end_s - transfer.begin_s == 1.0
    assert transfer.attributes["pdserve.kv.bytes"] == 4096
    assert transfer.attributes["pdserve.prefill.worker"] == "p1"
    assert decode.attributes["pdserve.tokens"] == 8 and decode.attributes["pdserve.end"] == "length"


def test_a_lost_link_is_the_transfers_error() -> None:
    bench = DecodeBench()
    bench.start(1, 40, name=TRACED)
    bench.turn()
    bench.retire(1, LinkLost("gone"))
    bench.turn()
    assert shown(bench.spans) == [("wait_for_blocks", ""), ("transfer", "LinkLost")]


def test_one_that_its_router_takes_back_is_no_error() -> None:
    bench = DecodeBench()
    bench.start(1, 40, name=TRACED)
    bench.turn()
    bench.core.handle(FromSession(1, Abort(1)))
    bench.turn()
    assert shown(bench.spans) == [("wait_for_blocks", ""), ("transfer", "")]


def test_a_prompt_that_is_computed_here_has_its_chunks() -> None:
    bench = DecodeBench(decode_prefill_tokens=None)
    bench.start(1, 150, local=True, name=TRACED)
    bench.run()
    assert shown(bench.spans) == [("wait_for_blocks", ""), ("prefill", ""), ("decode", "")]
    chunks = [event.attributes["pdserve.computed_tokens"] for event in bench.spans[1].events]
    assert chunks == [64, 128, 150]
    assert "pdserve.prefill.worker" not in bench.spans[1].attributes


def test_what_is_preempted_shows_it_and_is_computed_again() -> None:
    bench = DecodeBench(num_blocks=9)
    for handle in (1, 2):
        bench.start(handle, 30, max_tokens=60, name=TRACED)
        bench.hand_off(handle)
        bench.clock.advance(0.1)
    while bench.turn() == 0.0:
        bench.clock.advance(0.1)
    [moments] = [span.events for span in bench.spans if span.name == "decode" and span.events]
    assert [event.name for event in moments][:2] == ["preempted", "chunk"]
