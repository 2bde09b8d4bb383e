"""NCCL's double between real processes: either end is killed, or stopped and continued, in a call of it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.device_process import Stage, staged
from tests.support.link_process import LIMIT_S

CALLS = ("init", "end_group", "is_over", "abort")
"""While joining; at the receives or sends; while they are under way; at the end of a communicator."""


@pytest.fixture(params=["p", "d"])
def stage(request: pytest.FixtureRequest) -> Iterator[Stage]:
    """The other end is the prefill worker, or the decode worker."""
    with staged("nccl", request.param) as made:
        yield made


@pytest.mark.parametrize("call", CALLS)
def test_killed_in_a_call(stage: Stage, call: str) -> None:
    """The lease fails, its blocks are free, its communicator is gone; the next process of that id is a peer as any."""
    process, pipe = stage.start(1, call, signal.SIGKILL)
    stage.strike(pipe, call)
    process.join(LIMIT_S)
    assert process.exitcode == -signal.SIGKILL
    stage.here.until(stage.is_given_up)
    assert "memfd:nccl-double" not in Path("/proc/self/maps").read_text()
    _process, pipe = stage.start(2)
    stage.here.until(lambda: stage.is_up)
    assert stage.ends_well(pipe, 2, lease_id=9)


@pytest.mark.slow
@pytest.mark.parametrize("call", CALLS)
def test_stopped_in_a_call_and_continued(stage: Stage, call: str) -> None:
    """It is given up meanwhile and goes on without harm: the pair comes up again, and what is handed off is right."""
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
