"""NCCL's double between real processes: either end is killed, or stopped and continued, in a call of it."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from kv_transfer import messages
from pdserve.errors import WorkerLost
from pdserve.service.config import TimeoutsConfig
from tests.support.link_process import LIMIT_S, ref
from tests.support.nccl_process import NcclLinkEnd, start

SHORT = TimeoutsConfig(keepalive_s=0.2, link_s=1.2, lease_s=1.6, handoff_s=2.0)
CALLS = ("init", "end_group", "is_over", "abort")
"""While joining; at the receives or sends; while they are under way; at the end of a communicator."""


class Stage:
    """One end is here, the other is a process. Leases are numbered by the test, over the whole pool."""

    def __init__(self, folder: Path, far_role: str) -> None:
        self.far_role = far_role
        self.folder = folder
        self.started: list[BaseProcess] = []
        self.here = NcclLinkEnd(ref("d" if far_role == "p" else "p", 1), folder, SHORT)
        self.here.fill(1)

    def start(self, number: int, call: str = "", sign: int = 0) -> tuple[BaseProcess, Connection]:
        """The other end, of this number."""
        process, pipe = start(self.far_role, self.folder, number, SHORT, call, sign)
        self.started.append(process)
        assert pipe.poll(LIMIT_S)
        addresses = pipe.recv()
        pipe.send((self.here.me, self.here.owner.addresses))
        if self.far_role == "d":
            self.here.owner.handle(messages.CancelAllLinks(number - 1))
            self.here.owner.handle(messages.OrderLink(number, ref("d", number), addresses))
        return process, pipe

    def begin(self, pipe: Connection, number: int, lease_id: int) -> None:
        """A lease, on both sides."""
        if self.far_role == "p":
            self.here.expect_all(lease_id, ref("p", number))
            pipe.send(lease_id)
        else:
            pipe.send(lease_id)
            self.here.offer_all(lease_id, ref("d", number))

    def end(self, lease_id: int) -> messages.HandedOff | messages.Retired | messages.LeaseClosed | None:
        """How it ended here, if it has."""
        kinds = (messages.HandedOff, messages.Retired, messages.LeaseClosed)
        ends = [said for said in self.here.seen if isinstance(said, kinds) and said.lease_id == lease_id]
        assert len(ends) <= 1
        return ends[0] if ends else None

    def ends_well(self, pipe: Connection, number: int, lease_id: int) -> bool:
        """Hand a lease off, right to the last byte; False if it fails."""
        self.begin(pipe, number, lease_id)
        self.here.until(lambda: self.end(lease_id) is not None)
        end = self.end(lease_id)
        if isinstance(end, messages.HandedOff):
            assert end.transport == "nccl" and self.here.holds_all_of(number)
            return True
        self.here.until(pipe.poll)
        heard = pipe.recv()
        while heard[0] != lease_id:
            self.here.until(pipe.poll)
            heard = pipe.recv()
        assert heard[1] or (end is not None and end.error is not None), "confirmed, and wrong"
        return end is not None and not isinstance(end, messages.Retired) and end.error is None

    @property
    def is_up(self) -> bool:
        return self.here.owner.metrics.links_up == 1

    def strike(self, pipe: Connection, call: str) -> None:
        """Until the other end is in that call."""
        if call != "init":
            self.here.until(lambda: self.is_up)
            self.begin(pipe, 1, 1)
        if call == "abort":
            self.here.until(lambda: self.here.is_moving)
            for link in list(self.here.owner._links):
                link.end(WorkerLost("ended by the test"))
        self.here.until(pipe.poll)
        assert pipe.recv() == call

    def is_given_up(self) -> bool:
        """The lease that was begun has failed here, and every communicator is freed."""
        if self.here.owner.metrics.open_leases or self.here.device.num_live:
            return False
        end = self.end(1)
        assert end is None or (not isinstance(end, messages.HandedOff) and end.error is not None)
        released = {said.lease_id for said in self.here.said(messages.LeaseReleased)}
        return not (isinstance(end, messages.Retired) and end.quarantine) or released == {1}


@pytest.fixture(params=["p", "d"])
def stage(request: pytest.FixtureRequest) -> Iterator[Stage]:
    """The other end is the prefill worker, or the decode worker."""
    with tempfile.TemporaryDirectory(prefix="pdf") as name:
        made = Stage(Path(name), request.param)
        yield made
        for process in made.started:
            process.kill()
            process.join()
        made.here.owner.close()


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
