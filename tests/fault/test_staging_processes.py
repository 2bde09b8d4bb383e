"""Pinned staging's double between real processes: either end is killed, or stopped and continued, in mid-copy."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from kv_transfer import messages
from pdserve.errors import WorkerLost
from tests.support.device_process import Stage, staged
from tests.support.link_process import LIMIT_S

CALLS = {"p": ("fetch", "record", "is_over"), "d": ("store", "record", "is_over")}
CELLS = [
    pytest.param(role, call, marks=() if call in ("fetch", "store") else pytest.mark.slow)
    for role in "pd"
    for call in CALLS[role]
]


@pytest.fixture
def stage(request: pytest.FixtureRequest) -> Iterator[Stage]:
    """The other end is the prefill worker, or the decode worker."""
    with staged("stream", request.param) as made:
        yield made


@pytest.mark.parametrize(("stage", "call"), CELLS, indirect=["stage"])
def test_killed_in_a_call(stage: Stage, call: str) -> None:
    """The lease fails, its blocks and its staging memory are free; the next process of that id is a peer as any."""
    process, pipe = stage.start(1, call, signal.SIGKILL)
    stage.strike(pipe, call)
    process.join(LIMIT_S)
    assert process.exitcode == -signal.SIGKILL
    stage.here.until(stage.is_given_up)
    _process, pipe = stage.start(2)
    stage.here.until(lambda: stage.is_up)
    assert stage.ends_well(pipe, 2, lease_id=9)


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "call"), CELLS, indirect=["stage"])
def test_stopped_in_a_call_and_continued(stage: Stage, call: str) -> None:
    """It is given up meanwhile; the pair comes up again, and what is handed off is right."""
    process, pipe = stage.start(1, call, signal.SIGSTOP)
    stage.strike(pipe, call)
    stage.here.until(stage.is_given_up)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGCONT)
    for lease_id in range(10, 20):  # the first ones may meet the end of the old link at the other side
        stage.here.until(lambda: stage.is_up)
        if stage.ends_well(pipe, 1, lease_id):
            return
    pytest.fail("nothing is handed off any more")


@pytest.mark.parametrize("stage", ["p"], indirect=True)
def test_a_prefill_worker_killed_while_decode_copies(stage: Stage) -> None:
    """D's blocks stay in quarantine until its own device is done with them."""
    copies = stage.here.copies
    process, pipe = stage.start(1)
    stage.here.until(lambda: stage.is_up)
    copies.gate.clear()
    stage.begin(pipe, 1, 1)
    stage.here.until(copies.is_copying.is_set)
    process.kill()
    process.join()
    stage.here.until(lambda: stage.end(1) is not None)
    retired = stage.end(1)
    assert isinstance(retired, messages.Retired) and isinstance(retired.error, WorkerLost)
    assert retired.quarantine and not stage.here.said(messages.LeaseReleased)
    copies.gate.set()
    stage.here.until(stage.is_given_up)
    _process, pipe = stage.start(2)
    stage.here.until(lambda: stage.is_up)
    assert stage.ends_well(pipe, 2, lease_id=2)


@pytest.mark.parametrize("stage", ["d"], indirect=True)
def test_a_decode_worker_killed_while_prefill_copies(stage: Stage) -> None:
    """P's blocks are held until its own device is done with them."""
    copies = stage.here.copies
    process, pipe = stage.start(1)
    stage.here.until(lambda: stage.is_up)
    copies.gate.clear()
    stage.begin(pipe, 1, 1)
    stage.here.until(copies.is_copying.is_set)
    process.kill()
    process.join()
    stage.here.until(lambda: stage.here.owner.metrics.links_up == 0)
    assert stage.end(1) is None
    copies.gate.set()
    stage.here.until(stage.is_given_up)
    closed = stage.end(1)
    assert isinstance(closed, messages.LeaseClosed) and isinstance(closed.error, WorkerLost)
