"""`pdserve top`: what it reckons from a router's counts, and what it shows."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterator
from itertools import islice

import pytest
from rich.console import Console

from pdserve.block_messages import BlockCounts
from pdserve.cli.main import main
from pdserve.cli.top import Recent, json_line, polled, screen, text_line
from pdserve.errors import InvalidRequest, NoWorker
from pdserve.figures import RouterFigures, Spread
from pdserve.rpc.codec import compile_converter
from pdserve.rpc.v1 import inference_pb2 as pb
from pdserve.status import CLUSTER_STATUS, ClusterStatus, PairStatus, QueueStatus, WorkerStatus
from tests.unit.cli.scripted_router import ScriptedRouter

BOUNDS_S = (0.1, 0.2, 0.4)


def figures(
    at_s: float, ended: int = 0, ttft: tuple[int, ...] = (0, 0, 0, 0), tokens: int = 0
) -> RouterFigures:
    spread = Spread(BOUNDS_S, ttft)
    return RouterFigures(at_s=at_s, num_requests_ended=ended, num_completion_tokens=tokens, ttft=spread)


def status(counted: RouterFigures) -> ClusterStatus:
    worker = WorkerStatus(
        id="decode-0",
        role="decode",
        epoch="7",
        role_generation=1,
        state="up",
        blocks=BlockCounts(90, 1, 2, 3, 4),
        num_running=5,
        num_waiting=6,
        num_queued_tokens=0,
        num_cache_hit_tokens=1,
        num_cache_query_tokens=4,
        metrics_address="",
        numerics="",
        num_steps=1,
    )
    pairs = (
        PairStatus(prefill_worker="prefill-0", decode_worker="decode-0", up=True, transport="memfd"),
        PairStatus(prefill_worker="prefill-1", decode_worker="decode-0", up=False, reason="silent"),
    )
    queue = QueueStatus(num_waiting=2, num_waiting_tokens=30, num_running=4, limit=8)
    return ClusterStatus(
        router_id="r", draining=False, workers=(worker,), pairs=pairs, queue=queue, figures=counted
    )


def shown(renderable: object) -> str:
    console = Console(file=io.StringIO(), width=80)
    console.print(renderable)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("counts", "percent", "seconds"),
    [
        ((0, 0, 0, 0), 50, None),
        ((4, 0, 0, 0), 50, 0.05),
        ((2, 2, 0, 0), 50, 0.1),
        ((2, 2, 0, 0), 75, 0.15),
        ((0, 0, 4, 0), 100, 0.4),
        ((1, 0, 0, 1), 99, math.inf),
    ],
)
def test_a_percentile_lies_within_its_bucket(
    counts: tuple[int, ...], percent: float, seconds: float | None
) -> None:
    assert Spread(BOUNDS_S, counts).percentile(percent) == (
        None if seconds is None else pytest.approx(seconds)
    )


@pytest.mark.parametrize(
    "spread",
    [
        pb.Spread(bounds_s=[0.1, 0.1], counts=[1, 2, 3]),
        pb.Spread(bounds_s=[math.nan], counts=[1, 2]),
        pb.Spread(bounds_s=[0.1], counts=[1]),
        pb.Spread(bounds_s=[math.inf], counts=[1, 1]),
    ],
)
def test_a_histogram_that_is_none_is_refused(spread: pb.Spread) -> None:
    with pytest.raises(InvalidRequest):
        compile_converter(Spread, pb.Spread).read(spread)


def test_rates_and_percentiles_are_of_the_window() -> None:
    recent = Recent(10.0)
    recent.add(figures(0.0, 100, (50, 0, 0, 0), tokens=1000))
    assert recent.rate("num_requests_ended") == 0
    assert recent.spread("ttft").percentile(50) is None
    for second in range(1, 31):
        recent.add(figures(float(second), 100 + second, (50, second, 0, 0), tokens=1000 + 8 * second))
    assert recent.rate("num_requests_ended") == pytest.approx(1.0)
    assert recent.rate("num_completion_tokens") == pytest.approx(8.0)
    assert recent.spread("ttft") == Spread(BOUNDS_S, (0, 10, 0, 0))


@pytest.mark.parametrize("later", [figures(1.0, 3), figures(60.0, 3)], ids=["clock", "count"])
def test_a_router_that_began_again_begins_a_new_window(later: RouterFigures) -> None:
    recent = Recent(10.0)
    recent.add(figures(50.0, 100))
    recent.add(later)
    assert recent.rate("num_requests_ended") == 0
    recent.add(figures(later.at_s + 1, 7))
    assert recent.rate("num_requests_ended") == pytest.approx(4.0)


def test_bytes_while_hand_offs_run() -> None:
    recent = Recent(10.0)
    recent.add(RouterFigures())
    assert recent.link_bytes_s == 0
    recent.add(RouterFigures(at_s=2.0, num_kv_bytes=1000, kv_transfer_s=0.5))
    assert recent.link_bytes_s == pytest.approx(2000)


def test_a_router_that_does_not_answer_is_asked_again() -> None:
    answers: Iterator[ClusterStatus | NoWorker] = iter(
        (status(figures(0.0)), NoWorker("gone"), status(figures(2.0, 4)))
    )
    waits: list[None] = []

    def ask() -> ClusterStatus:
        answer = next(answers)
        if isinstance(answer, NoWorker):
            raise answer
        return answer

    seen = polled(ask, lambda: waits.append(None), 10.0)
    problems = [(problem, recent.rate("num_requests_ended")) for _, recent, problem in islice(seen, 3)]
    assert problems == [("", 0), ("no answer: gone", 0), ("", 2.0)]
    assert len(waits) == 2


def test_the_first_question_must_be_answered() -> None:
    def ask() -> ClusterStatus:
        raise NoWorker("gone")

    with pytest.raises(NoWorker):
        next(polled(ask, lambda: None, 10.0))


def test_all_of_it_on_80_columns() -> None:
    recent = Recent(10.0)
    recent.add(figures(0.0))
    counted = RouterFigures(
        at_s=10.0,
        num_requests_ended=20,
        num_requests_refused=3,
        num_requests_failed=1,
        num_kv_bytes=50_000_000,
        kv_transfer_s=0.05,
        ttft=Spread(BOUNDS_S, (0, 10, 0, 10)),
    )
    recent.add(counted)
    text = shown(screen(status(counted), recent, "no answer: x"))
    assert "router r: 4 running, 2 of at most 8 waiting (30 tokens)" in text
    assert "2.0 requests/s, 0.3 refused/s, 0.1 failed/s" in " ".join(text.split())
    assert "KV shipped 5.0 MB/s, 1,000 MB/s while hand-offs run" in text
    assert "no answer: x" in text
    rows = [line.split() for line in text.splitlines()]
    assert ["first", "token", "200.0", "ms", ">", "0.4", "s", ">", "0.4", "s"] in rows
    assert ["decode-0", "decode", "up", "5", "6", "0", "90", "1", "2", "3", "4", "25%"] in rows
    assert ["prefill-0", "decode-0", "memfd"] in rows
    assert ["prefill-1", "decode-0", "down:", "silent"] in rows


def test_lines_for_people_and_programs() -> None:
    recent = Recent(10.0)
    recent.add(figures(0.0))
    counted = figures(10.0, 20, (20, 0, 0, 0))
    recent.add(counted)
    assert text_line(status(counted), recent).startswith(
        "1 of 1 workers up, 4 running, 2 waiting, 2.0 requests/s"
    )
    told = json.loads(json_line(status(counted), recent))
    assert (told["requests_s"], told["pairs_up"], told["workers"]) == (2.0, 1, {"decode-0": "up"})
    assert told["ttft_ms"]["p50"] == 50.0
    assert told["gap_ms"]["p50"] is None


def test_an_older_router_has_no_figures() -> None:
    answer = CLUSTER_STATUS.write(status(figures(1.0)))
    answer.ClearField("figures")
    assert CLUSTER_STATUS.read(answer).figures == RouterFigures()


def test_as_many_answers_as_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    with ScriptedRouter() as router:
        line = ["top", "--target", router.target, "--json", "--interval", "0.1", "--count", "2"]
        assert main(line, {}) == 0
    assert len([json.loads(each) for each in capsys.readouterr().out.splitlines()]) == 2


@pytest.mark.parametrize(
    "flags", [("--interval", "0"), ("--interval", "nan"), ("--window", "0.5"), ("--count", "-1")]
)
def test_times_that_are_none(flags: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", *flags], {}) == 1
    assert f"error: {flags[0]} must" in capsys.readouterr().err
