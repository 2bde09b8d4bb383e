"""CUDA IPC's double between real processes: either end is killed, or stopped and continued, in mid-copy."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from kv_transfer import messages
from pdserve.errors import WorkerLost
from tests.support.device_process import Stage, staged
from tests.support.link_process import LIMIT_S

CALLS = ("open", "copy", "record", "is_over", "close")
"""Of the decode worker, which makes them all."""


@pytest.fixture
def reader() -> Iterator[Stage]:
    """The decode worker is the other process."""
    with staged("cuda_ipc", "d") as made:
        yield made


@pytest.fixture
def read() -> Iterator[Stage]:
    """The prefill worker is."""
    with staged("cuda_ipc", "p") as made:
        yield made


def _num_mapped() -> int:
    """Pools, this process's own among them. Those of earlier tests are gone when they are collected."""
    gc.collect()
    return Path("/proc/self/maps").read_text().count("memfd:pdserve-kv")


@pytest.mark.parametrize("call", CALLS)
def test_a_decode_worker_killed_in_a_call(reader: Stage, call: str) -> None:
    """The lease fails, the blocks are free; the next process of that id is a peer as any."""
    process, pipe = reader.start(1, call, signal.SIGKILL)
    reader.strike(pipe, call)
    process.join(LIMIT_S)
    assert process.exitcode == -signal.SIGKILL
    reader.here.until(lambda: not reader.here.owner.metrics.open_leases)
    _process, pipe = reader.start(2)
    reader.here.until(lambda: reader.is_up)
    assert reader.ends_well(pipe, 2, lease_id=9)


@pytest.mark.slow
@pytest.mark.parametrize("call", CALLS)
def test_a_decode_worker_stopped_in_a_call_and_continued(reader: Stage, call: str) -> None:
    """It is given up meanwhile; the pair comes up again, and what is handed off is right."""
    process, pipe = reader.start(1, call, signal.SIGSTOP)
    reader.strike(pipe, call)
    reader.here.until(lambda: reader.here.owner.metrics.links_up == 0)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGCONT)
    for lease_id in range(10, 20):  # the first ones may meet the end of the old link at the other side
        reader.here.until(lambda: reader.is_up)
        if reader.ends_well(pipe, 1, lease_id):
            return
    pytest.fail("nothing is handed off any more")


def test_a_prefill_worker_killed_in_mid_copy(read: Stage) -> None:
    """Its pool stays mapped, and D's blocks in quarantine, until the device is done with it."""
    before = _num_mapped()
    gated = read.here.gated
    process, pipe = read.start(1)
    read.here.until(lambda: read.is_up)
    gated.gate.clear()
    read.begin(pipe, 1, 1)
    read.here.until(gated.is_copying.is_set)
    process.kill()
    process.join()
    read.here.until(lambda: read.end(1) is not None)
    retired = read.end(1)
    assert isinstance(retired, messages.Retired) and isinstance(retired.error, WorkerLost)
    assert retired.quarantine and not read.here.said(messages.LeaseReleased)
    assert _num_mapped() == before + 1
    gated.gate.set()
    read.here.until(lambda: bool(read.here.said(messages.LeaseReleased)))
    read.here.until(lambda: read.here.is_free)
    assert _num_mapped() == before
    _process, pipe = read.start(2)
    read.here.until(lambda: read.is_up)
    assert read.ends_well(pipe, 2, lease_id=2)


def test_a_prefill_worker_stopped_in_mid_copy_and_continued(read: Stage) -> None:
    """All is read without its doing anything; only its CONFIRM is missing, and comes when it goes on."""
    gated = read.here.gated
    process, pipe = read.start(1)
    read.here.until(lambda: read.is_up)
    gated.gate.clear()
    read.begin(pipe, 1, 1)
    read.here.until(gated.is_copying.is_set)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    gated.gate.set()
    read.here.until(lambda: not read.here.is_moving)
    assert read.end(1) is None, "nothing runs on what isn't confirmed"
    os.kill(process.pid, signal.SIGCONT)
    read.here.until(lambda: read.end(1) is not None)
    if isinstance(read.end(1), messages.HandedOff):
        assert read.here.holds_all_of(1)
    else:  # the machine was so slow that it was given up
        read.here.until(lambda: read.is_up)
        assert read.ends_well(pipe, 1, lease_id=2)
