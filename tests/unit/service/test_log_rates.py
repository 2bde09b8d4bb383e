"""What somebody from outside can cause doesn't fill the log."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from pdserve.service.log_rates import A_FEW, ALL_BUT_A_FLOOD, MOST_LINES, WINDOW_S, LogRates
from tests.support.virtual_clock import VirtualClock


def passed(rates: LogRates, name: str, count: int) -> list[int]:
    """How many each line that passes says were left out before it."""
    found = []
    for _ in range(count):
        try:
            found.append(int(rates(None, "info", {"event": name}).get("num_left_out", 0)))
        except structlog.DropEvent:
            continue
    return found


def test_so_many_of_a_kind_pass_and_the_next_says_how_many_did_not() -> None:
    clock = VirtualClock()
    rates = LogRates(clock)
    assert passed(rates, "request.refused", 10_000) == [0] * A_FEW
    assert passed(rates, "session.refused", 3) == [0, 0, 0], "another kind has its own"
    clock.advance(WINDOW_S)
    assert passed(rates, "request.refused", 2) == [10_000 - A_FEW, 0]


def test_the_story_of_requests_is_told_up_to_a_flood() -> None:
    clock = VirtualClock()
    rates = LogRates(clock)
    assert passed(rates, "request.finished", 5_000) == [0] * ALL_BUT_A_FLOOD
    clock.advance(WINDOW_S)
    assert passed(rates, "request.finished", 2) == [5_000 - ALL_BUT_A_FLOOD, 0]


@pytest.mark.parametrize("name", ["worker.left", "step.died"])
def test_what_only_the_cluster_can_cause_is_not_bounded(name: str) -> None:
    assert name not in MOST_LINES
    assert len(passed(LogRates(VirtualClock()), name, 1_000)) == 1_000


# Lines whose number the operator, the machine or the other processes of the cluster decide, by what they are about.
OF_THE_CLUSTER = {
    "cache_events", "certificates", "children", "energy", "engine", "gateway", "kernels", "keys", "listener", "loop",
    "model", "nccl", "owner", "pair", "pool", "process", "rank", "ranks", "role", "router", "tokenizer", "vocabulary",
    "worker",
}  # fmt: skip
SINGLY = {
    "calls.refused",  # counts its own, and speaks once a second
    "client.asks_call_by_call",  # of a client's own process, once a minute for each router
    "child.not_forked",  # the machine has no process left
    "link.fell_back",
    "link.no_unix_socket",
    "link.not_deterministic",
    "link.stale_socket_removed",
    "link.up",  # to workers that have proven themselves
    "piece.corrupt",
    "step.died",
    "tracing.crashed",  # its thread ends with it
    "tracing.not_taken",  # once a minute
    "transport.double",  # once, at the start of a worker that tries what needs a GPU
    "weights.decoded",  # once for each kind and reason, while a model loads
}
ROOMS = ("router", "prefill_worker", "decode_worker", "kv_transfer", "http_door", "pdserve")


def _lines() -> Iterator[str]:
    """Names of all log lines above debug."""
    root = Path(__file__).resolve().parents[3]
    for path in sorted(path for room in ROOMS for path in (root / room).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            call = node.func
            named = (
                isinstance(call, ast.Attribute)
                and isinstance(call.value, ast.Name)
                and call.value.id == "log"
            )
            if isinstance(call, ast.IfExp) or (
                named and isinstance(call, ast.Attribute) and call.attr != "debug"
            ):
                for part in ast.walk(node.args[0]):
                    if isinstance(part, ast.Constant) and isinstance(part.value, str):
                        yield part.value


def test_every_line_is_bounded_or_of_the_cluster() -> None:
    names = set(_lines()) - {"lease.aborted"}  # at level debug; it shares its call with lease.failed
    assert len(names) > 60
    open_ones = {
        name for name in names - set(MOST_LINES) - SINGLY if name.split(".")[0] not in OF_THE_CLUSTER
    }
    assert not open_ones, (
        "can a client, or a stranger, cause any number of these? (pdserve/service/log_rates.py)"
    )
    assert set(MOST_LINES) <= names
