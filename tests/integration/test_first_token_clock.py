"""The time to the first token as a client's own clock has it, beside the spans that a real collector decoded.

Cluster and client run before all else on this machine, as they would on an idle one: what is measured is what pdserve
puts between the two clocks, not how long a busy machine lets a process wait. Where that isn't allowed, it is skipped.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.collector import KeptSpans, SeenSpan, rotel_program, running_rotel
from tests.support.processes import LocalCluster

PROGRAM = rotel_program()
NUM_REQUESTS = 40
SPANS_EACH = 12  # of router, prefill and decode worker
WITHIN_S = 0.002
PARTS = ("queue", "reserve", "prefill", "relay")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(PROGRAM is None, reason="rotel has no build for this platform"),
]


@contextlib.contextmanager
def first_in_line() -> Iterator[None]:
    """Processes that are started in the block go before all others of this machine."""
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    except OSError:
        pytest.skip("real-time scheduling isn't allowed here: a busy machine would be measured")
    try:
        yield
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


async def test_the_spans_sum_to_what_a_client_stops(tmp_path: Path) -> None:
    assert PROGRAM is not None
    with contextlib.ExitStack() as stack:
        kept = stack.enter_context(contextlib.closing(KeptSpans()))
        endpoint = stack.enter_context(running_rotel(PROGRAM, tmp_path, kept.port))
        flags = (
            "--tracing.endpoint",
            endpoint,
            "--tracing.sample-ratio",
            "0",
            "--engine.fake-step-s",
            "0.02",
        )
        with first_in_line():
            cluster = stack.enter_context(LocalCluster(tmp_path, "--engine", "fake", *flags))
            stopped = stop_times(cluster)
        more_s: dict[str, list[float]] = defaultdict(list)
        for each in stopped:
            spans = await kept.trace(each["trace_id"], SPANS_EACH)
            assert {span.instance.rstrip("0123456789-") for span in spans} >= {"prefill", "decode"}
            more_s[each["door"]].append(each["ttft_s"] - ttft_s(spans))
    for door, each_s in more_s.items():
        shown = " ".join(f"{part * 1e3:.2f}" for part in statistics.quantiles(each_s, n=10)[::4])
        print(f"{door}: p10, p50, p90 of a client's TTFT - its spans' sum: {shown} ms, n {len(each_s)}")
        assert len(each_s) == NUM_REQUESTS
        assert min(each_s) > 0, "what the router does lies between the client's two moments"
        assert statistics.median(each_s) < WITHIN_S


def stop_times(cluster: LocalCluster) -> list[dict[str, Any]]:
    """What a client in a process of its own says of its requests, one after another."""
    words = [sys.executable, "-m", "tests.support.first_token_clock", cluster.http, cluster.target]
    done = subprocess.run(
        [*words, str(NUM_REQUESTS)], capture_output=True, text=True, timeout=120, check=True
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def ttft_s(spans: list[SeenSpan]) -> float:
    of_router = {span.name: span.took_s for span in spans if span.service == "pdserve-router"}
    return sum(of_router[name] for name in PARTS)
