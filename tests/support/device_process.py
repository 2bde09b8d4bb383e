"""Transfer owners in processes of their own, over the doubles of devices, which strike themselves in a call.

Stage has one end in the test's process, and the other in such a process.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, cast

from kv_transfer import messages
from kv_transfer.transports.cuda_ipc import IpcDevice
from kv_transfer.transports.cuda_ipc_port import CudaIpc
from kv_transfer.transports.nccl import NcclNetwork
from kv_transfer.transports.nccl_device import NcclDevice
from kv_transfer.transports.nccl_port import Nccl
from kv_transfer.transports.port import Network
from kv_transfer.transports.staged import StagedNetwork
from kv_transfer.transports.staging import Staging
from kv_transfer.transports.staging_port import HostCopies
from kv_transfer.transports.stream import StreamNetwork
from pdserve.clock import SystemClock
from pdserve.errors import WorkerLost
from pdserve.ids import WorkerRef
from pdserve.kv_memory import KvMemory
from pdserve.memfd import MappedPool
from pdserve.node.cuda_ipc_double import CudaIpcDouble
from pdserve.node.nccl_double import NcclDouble
from pdserve.node.staging_double import StagingDouble
from pdserve.service.config import TimeoutsConfig
from tests.support.link_process import LAYOUT, LIMIT_S, LinkEnd, ref

SHORT = TimeoutsConfig(keepalive_s=0.2, link_s=1.2, lease_s=1.6, handoff_s=2.0)
_JOINING = ("init", "open")
_ENDING = ("abort", "close")
_NUM_SLOTS = 8
_Strike = Callable[[str], None]


class _Striking:
    """A port that tells of each call before it is made."""

    def __init__(self, inner: Nccl | CudaIpc | HostCopies, strike: _Strike) -> None:
        self._inner = inner
        self._strike = strike

    def __getattr__(self, call: str) -> Any:
        self._strike(call)
        return getattr(self._inner, call)


class _GatedIpc(CudaIpcDouble):
    """Whose device copies when `gate` is open. is_copying: it is about to."""

    def __init__(self, end: DeviceLinkEnd) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.is_copying = threading.Event()
        super().__init__(end.memory)

    def _copy(self, pool: MappedPool, start: int, into: int, num_bytes: int) -> None:
        self.is_copying.set()
        self.gate.wait()
        super()._copy(pool, start, into, num_bytes)


class _GatedCopies(StagingDouble):
    """Whose device copies when `gate` is open. is_copying: it is about to."""

    def __init__(self, end: DeviceLinkEnd) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.is_copying = threading.Event()
        super().__init__(end.memory)

    def _copy(self, target: memoryview, source: memoryview) -> None:
        self.is_copying.set()
        self.gate.wait()
        super()._copy(target, source)


class DeviceLinkEnd(LinkEnd):
    """A LinkEnd whose pieces go over a double. kind: "nccl", "cuda_ipc", or "stream" through pinned memory; strike:
    told of each call."""

    def __init__(
        self,
        me: WorkerRef,
        folder: Path,
        timeouts: TimeoutsConfig,
        kind: str,
        strike: _Strike = lambda call: None,
    ) -> None:
        self.kind = kind
        self._strike = strike
        super().__init__(me, folder, timeouts, tuple(dict.fromkeys((kind, "stream"))))

    def _seen(self, timeouts: TimeoutsConfig) -> KvMemory:
        if self.kind != "stream":
            return self.memory
        self.copies = _GatedCopies(self)
        self.staging = Staging(
            cast(HostCopies, _Striking(self.copies, self._strike)),
            self.memory,
            block_bytes=LAYOUT.block_bytes,
            staging_bytes=_NUM_SLOTS * LAYOUT.block_bytes,
            max_links=_NUM_SLOTS // 2,
            clock=SystemClock(),
            lease_s=timeouts.lease_s,
        )
        return self.staging.memory

    def _ipc(self, timeouts: TimeoutsConfig) -> IpcDevice | None:
        if self.kind != "cuda_ipc":
            return None
        self.gated = _GatedIpc(self)
        striking = cast(CudaIpc, _Striking(self.gated, self._strike))
        self.ipc = IpcDevice(striking, clock=SystemClock(), lease_s=timeouts.lease_s)
        return self.ipc

    def _network(self, stream: StreamNetwork, timeouts: TimeoutsConfig) -> Network:
        if self.kind == "stream":
            return StagedNetwork(stream, self.staging)
        if self.kind != "nccl":
            return stream
        self.nccl = NcclDouble(self.memory)
        striking = cast(Nccl, _Striking(self.nccl, self._strike))
        self.device = NcclDevice(striking, clock=SystemClock(), timeouts=timeouts, max_comms=4)
        return NcclNetwork(stream, self.device)

    @property
    def is_moving(self) -> bool:
        """Whether something is on its device."""
        if self.kind == "stream":
            return self.staging.num_pending > 0
        if self.kind == "cuda_ipc":
            return self.ipc.num_pending_reads > 0
        return any(not group.over.is_set() for group in self.nccl._on_device)

    @property
    def is_free(self) -> bool:
        """Whether nothing of any link is left on its device."""
        if self.kind == "stream":
            return self.staging.used_bytes == 0
        return self.device.num_live == 0 if self.kind == "nccl" else self.ipc.num_mapped == 0


def start(
    kind: str, role: str, folder: Path, number: int, call: str, sign: int
) -> tuple[BaseProcess, Connection]:
    """A worker "p" or "d" of this number. The first time that it is about to make this call, it says so and signals
    itself; after that it only goes on. p: fills its pool by its number.

    It takes (worker, addresses) or nothing, then lease ids, and says (lease id, whether all went well).
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_run, args=(theirs, kind, role, folder, number, call, sign))
    process.start()
    theirs.close()
    return process, ours


def _run(pipe: Connection, kind: str, role: str, folder: Path, number: int, call: str, sign: int) -> None:
    left = [call]

    def strike(called: str) -> None:
        if called in left:
            left.clear()
            pipe.send(called)
            os.kill(os.getpid(), sign)

    end = DeviceLinkEnd(ref(role, number), folder, SHORT, kind, strike)
    if role == "p":
        end.fill(number)
    pipe.send(end.owner.addresses)
    peer, addresses = pipe.recv()
    if role == "p":
        end.owner.handle(messages.OrderLink(1, peer, addresses))
    while True:
        end.turn()
        if pipe.poll():
            lease_id = pipe.recv()
            if role == "p":
                end.offer_all(lease_id, peer)
            else:
                end.expect_all(lease_id, peer)
        for said in list(end.seen):
            end.seen.remove(said)
            match said:
                case messages.HandedOff():
                    pipe.send((said.lease_id, end.holds_all_of(peer.epoch.nonce)))
                case messages.LeaseClosed():
                    pipe.send((said.lease_id, said.error is None))
                case messages.Retired():
                    pipe.send((said.lease_id, False))


class Stage:
    """One end is here, the other is a process. Leases are numbered by the test, over the whole pool."""

    def __init__(self, kind: str, folder: Path, far_role: str) -> None:
        self.kind = kind
        self.far_role = far_role
        self.folder = folder
        self.started: list[BaseProcess] = []
        self.here = DeviceLinkEnd(ref("d" if far_role == "p" else "p", 1), folder, SHORT, kind)
        self.here.fill(1)

    def start(self, number: int, call: str = "", sign: int = 0) -> tuple[BaseProcess, Connection]:
        """The other end, of this number."""
        process, pipe = start(self.kind, self.far_role, self.folder, number, call, sign)
        self.started.append(process)
        assert pipe.poll(LIMIT_S)
        addresses = pipe.recv()
        pipe.send((self.here.me, self.here.owner.addresses))
        if self.far_role == "d":
            self.here.owner.handle(messages.CancelAllLinks(number - 1))
            self.here.owner.handle(messages.OrderLink(number, ref("d", number), addresses))
        self.here.turn()
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
            shown_as = "stream-unix" if self.kind == "stream" else self.kind
            assert end.transport == shown_as and self.here.holds_all_of(number)
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
        if call not in _JOINING:
            self.here.until(lambda: self.is_up)
            self.begin(pipe, 1, 1)
        if call in _ENDING:
            self.here.until(lambda: self.here.is_moving or self.here.kind != "nccl")
            for link in list(self.here.owner._links):
                link.end(WorkerLost("ended by the test"))
        self.here.until(pipe.poll)
        assert pipe.recv() == call

    def is_given_up(self) -> bool:
        """The lease that was begun has failed here, and nothing of its link is left on the device."""
        if self.here.owner.metrics.open_leases or not self.here.is_free:
            return False
        end = self.end(1)
        assert end is None or (not isinstance(end, messages.HandedOff) and end.error is not None)
        released = {said.lease_id for said in self.here.said(messages.LeaseReleased)}
        return not (isinstance(end, messages.Retired) and end.quarantine) or released == {1}


@contextmanager
def staged(kind: str, far_role: str) -> Iterator[Stage]:
    """Its processes are gone afterwards, stopped or not."""
    with tempfile.TemporaryDirectory(prefix="pdf") as name:
        stage = Stage(kind, Path(name), far_role)
        try:
            yield stage
        finally:
            for process in stage.started:
                process.kill()
                process.join()
            stage.here.owner.close()
