"""NCCL as it behaves and as it may be used, in one process, on an injected schedule.

    the calls of one thread only           a group: sends or receives of one settled communicator, nothing in between
    both ends: as many, as large, in the same order   an event: only behind a group that has settled
    a send only where its receive stands   a communicator that failed or was revoked: only its abort

Whoever breaks one of these hears of it (NcclMisused). A group is a kernel: those of a device run one after another,
sends and receives apart, and one ends only with its peer's, or when its communicator is revoked. An abort waits for
all kernels that its device had when it began. Of a process that has gone, the other end hears sooner, later or never.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from kv_transfer.frames import MAX_PIECE_BYTES, MAX_PULLED_PIECES, UNIQUE_ID_BYTES
from kv_transfer.transports.nccl_port import SENDER_RANK, nccl_failed
from pdserve.kv_memory import ByteSpan
from tests.support.memories import StagedMemory
from tests.support.memory_channel import DeviceWatch, Schedule

_REMOTE = "remote process exited or there was a network error"


class NcclMisused(AssertionError):
    """A rule of NCCL, or of ours for it, is broken."""


def _rule(holds: bool, what: str) -> None:
    if not holds:
        raise NcclMisused(what)


class Way(Enum):
    """Of a group, and the stream that it lies on."""

    SEND = "send"
    RECEIVE = "receive"


@dataclass(slots=True, eq=False)
class _Op:
    memory: StagedMemory
    span: ByteSpan | None
    num_bytes: int


@dataclass(slots=True, eq=False)
class _Kernel:
    comm: _Comm
    way: Way
    ops: list[_Op]
    is_running: bool = False
    is_over: bool = False


class _State(Enum):
    JOINING = "joining"
    SETTLED = "settled"
    UNSETTLED = "unsettled"  # a group isn't on the device yet
    REVOKED = "revoked"
    ABORTING = "aborting"
    GONE = "gone"


@dataclass(slots=True, eq=False)
class _Comm:
    number: int
    device: LoopNccl
    rank: int
    state: _State = _State.JOINING
    error: str | None = None
    peer: _Comm | None = None
    group: _Kernel | None = None
    lying: dict[Way, deque[_Kernel]] = field(default_factory=lambda: {way: deque() for way in Way})
    num_posted: int = 0  # receives that ever lay on the device, and sends
    num_sent: int = 0


class NcclFabric:
    """What connects the devices. holds: whether nothing passes from a host to another now; told by `heal`."""

    def __init__(
        self,
        *,
        schedule: Schedule,
        delay: Callable[[], float],
        random: random.Random,
        holds: Callable[[str, str], bool] = lambda source, target: False,
    ) -> None:
        self.schedule = schedule
        self.delay = delay
        self.random = random
        self.holds = holds
        self.devices: list[LoopNccl] = []
        self._num_made = 0
        self._waiting: dict[bytes, _Comm | None] = {}

    def next_number(self) -> int:
        self._num_made += 1
        return self._num_made

    def make_unique_id(self) -> bytes:
        unique_id = self.next_number().to_bytes(UNIQUE_ID_BYTES, "little")
        self._waiting[unique_id] = None
        return unique_id

    def join(self, unique_id: bytes, comm: _Comm) -> None:
        """The second rank to come makes it, unless the first has given up by then."""
        _rule(unique_id in self._waiting, "a unique id that nobody made, or used twice")
        other = self._waiting[unique_id]
        if other is None:
            self._waiting[unique_id] = comm
            return
        del self._waiting[unique_id]
        _rule(other.rank != comm.rank, "two ranks of one number")
        other.peer, comm.peer = comm, other
        for each in (other, comm):
            self.schedule(10 * self.delay(), lambda each=each: self._made(each))  # type: ignore[misc]

    def _made(self, comm: _Comm) -> None:
        assert comm.peer is not None
        if comm.state is not _State.JOINING or self._holds(comm):
            return
        if comm.peer.state not in (_State.JOINING, _State.SETTLED):
            return  # it waits, and never hears
        comm.state = _State.SETTLED
        comm.device.wake()

    def heal(self) -> None:
        """Something passes again that didn't."""
        for device in self.devices:
            for comm in device.comms.values():
                if comm.state is _State.JOINING and comm.peer is not None:
                    self.schedule(self.delay(), lambda comm=comm: self._made(comm))  # type: ignore[misc]
        self.stir()

    def stir(self) -> None:
        """Whatever can run does."""
        for device in self.devices:
            for lane in device.lanes.values():
                if lane and not lane[0].is_running:
                    self._run(lane[0])

    def _holds(self, comm: _Comm) -> bool:
        assert comm.peer is not None
        names = comm.device.name, comm.peer.device.name
        return self.holds(*names) or self.holds(*reversed(names))

    def _run(self, kernel: _Kernel) -> None:
        """If its peer's is the first on its device, too."""
        comm, peer = kernel.comm, kernel.comm.peer
        assert peer is not None
        theirs = peer.lying[_other(kernel.way)]
        if not theirs or comm.lying[kernel.way][0] is not kernel or self._holds(comm):
            return
        other = theirs[0]
        if other.is_running or peer.device.lanes[other.way][0] is not other:
            return
        send, receive = (kernel, other) if kernel.way is Way.SEND else (other, kernel)
        sizes = [[op.num_bytes for op in each.ops] for each in (send, receive)]
        _rule(sizes[0] == sizes[1], f"a group of sends {sizes[0]} for one of receives {sizes[1]}")
        kernel.is_running = other.is_running = True
        self.schedule(self.delay(), lambda: self._move(send, receive, 0))

    def _move(self, send: _Kernel, receive: _Kernel, index: int) -> None:
        """One piece after another, unless an end gives up meanwhile, or is gone."""
        if send.is_over or receive.is_over:
            return
        if self._holds(send.comm):
            self.schedule(20 * self.delay(), lambda: self._move(send, receive, index))
            return
        payload = send.comm.device.read(send.ops[index])
        receive.comm.device.write(receive.ops[index], payload)
        if index + 1 < len(send.ops):
            self.schedule(self.delay() / 4, lambda: self._move(send, receive, index + 1))
            return
        for kernel in (send, receive):
            wait_s = self.random.choice((1, 1, 1, 20)) * self.delay() + kernel.comm.device.end_takes_s
            self.schedule(wait_s, lambda kernel=kernel: self.end(kernel))  # type: ignore[misc]

    def end(self, kernel: _Kernel) -> None:
        """It leaves its device, and the next one's turn has come."""
        if kernel.is_over:
            return
        kernel.is_over = True
        kernel.comm.lying[kernel.way].remove(kernel)
        device = kernel.comm.device
        device.lanes[kernel.way].remove(kernel)
        device.go_on_with_aborts()
        device.wake()
        self.stir()

    def tell_lost(self, comm: _Comm) -> None:
        """An end of it has given up or gone: the other hears of it, or waits until it gives up itself."""
        peer = comm.peer
        if peer is None or peer.state in (_State.REVOKED, _State.ABORTING, _State.GONE):
            return
        draw = self.random.random()
        if draw < 0.5:
            return

        def told() -> None:
            peer.error = _REMOTE
            if draw < 0.75:  # then its kernels end, with whatever has arrived
                for lying in peer.lying.values():
                    for kernel in list(lying):
                        self.end(kernel)
            peer.device.wake()

        self.schedule(10 * self.delay(), told)


class LoopNccl:
    """One device: Nccl (kv_transfer/transports/nccl_port.py).

    memory, wake  of the present transfer owner: the next one, in another role, brings its own
    max_comms  live ones that the device has memory for
    """

    def __init__(
        self,
        fabric: NcclFabric,
        name: str,
        memory: StagedMemory,
        *,
        wake: Callable[[], None],
        watch: DeviceWatch | None = None,
        max_comms: int = 16,
    ) -> None:
        self.name = name
        self.memory = memory
        self.wake = wake
        self.comms: dict[int, _Comm] = {}
        self.lanes: dict[Way, list[_Kernel]] = {way: [] for way in Way}
        self.fails: dict[str, str] = {}  # the next call of this name fails with these words
        self.abort_takes_s: float | None = None  # in place of a drawn time
        self.end_takes_s = 0.0  # of a kernel that has moved everything, besides
        self._fabric = fabric
        self._watch = watch
        self._max_comms = max_comms
        self._events: dict[int, list[_Kernel]] = {}
        self._ops: list[_Op] | None = None
        self._aborts: list[tuple[_Comm, list[_Kernel]]] = []
        self._thread: int | None = None
        self._is_dead = False
        fabric.devices.append(self)

    # --- the calls

    def make_unique_id(self) -> bytes:
        self._enter("make_unique_id")
        return self._fabric.make_unique_id()

    def init(self, unique_id: bytes, rank: int) -> int:
        self._enter("init")
        live = [comm for comm in self.comms.values() if comm.state is not _State.GONE]
        _rule(len(live) < self._max_comms, "more communicators than the device has memory for")
        comm = _Comm(self._fabric.next_number(), self, rank)
        self.comms[comm.number] = comm
        self._fabric.join(unique_id, comm)
        return comm.number

    def is_settled(self, comm: int) -> bool:
        self._enter("is_settled")
        found = self._comm(comm)
        if found.error is not None:
            raise nccl_failed("ncclCommGetAsyncError", found.error)
        return found.state is _State.SETTLED

    def begin_group(self) -> None:
        self._enter("begin_group")
        _rule(self._ops is None, "a group in a group")
        self._ops = []

    def send(self, comm: int, span: ByteSpan) -> None:
        self._add(comm, Way.SEND, _Op(self.memory, span, span.num_bytes))

    def send_blank(self, comm: int, num_bytes: int) -> None:
        self._add(comm, Way.SEND, _Op(self.memory, None, num_bytes))

    def receive(self, comm: int, into: ByteSpan) -> None:
        self._add(comm, Way.RECEIVE, _Op(self.memory, into, into.num_bytes))

    def _add(self, comm: int, way: Way, op: _Op) -> None:
        self._enter(way.value)
        found = self._comm(comm)
        _rule(found.state is _State.SETTLED, f"a {way.value} of a communicator that is {found.state.value}")
        _rule((found.rank == SENDER_RANK) is (way is Way.SEND), "a rank that does the other's part")
        _rule(0 < op.num_bytes <= MAX_PIECE_BYTES, "a piece that is too large")
        _rule(self._ops is not None, "a send or receive outside of a group")
        assert self._ops is not None
        self._ops.append(op)
        if found.group is None:
            found.group = _Kernel(found, way, self._ops)
        _rule(found.group.ops is self._ops and found.group.way is way, "a group of two kinds")

    def end_group(self, comm: int) -> None:
        self._enter("end_group")
        found, ops, self._ops = self._comm(comm), self._ops, None
        kernel, found.group = found.group, None
        _rule(kernel is not None and kernel.ops is ops, "the end of another group than was begun")
        assert kernel is not None
        _rule(len(kernel.ops) <= MAX_PULLED_PIECES, "a group that is too large")
        found.state = _State.UNSETTLED
        if self._fabric.random.random() < 0.5:
            self._lay(kernel)
        else:
            self._fabric.schedule(self._fabric.delay(), lambda: self._lay(kernel))

    def _lay(self, kernel: _Kernel) -> None:
        comm = kernel.comm
        if comm.state is not _State.UNSETTLED or self._is_dead:
            kernel.is_over = True
            return
        assert comm.peer is not None
        comm.state = _State.SETTLED
        before = [other for other in self.lanes[kernel.way] if other.comm.state is _State.SETTLED]
        _rule(not before, f"a second group of {kernel.way.value}s on one device")
        if kernel.way is Way.RECEIVE:
            comm.num_posted += 1
        else:
            comm.num_sent += 1
            dead = comm.peer.state in (_State.REVOKED, _State.ABORTING, _State.GONE)
            _rule(dead or comm.num_sent <= comm.peer.num_posted, "a send whose receive doesn't stand")
        comm.lying[kernel.way].append(kernel)
        self.lanes[kernel.way].append(kernel)
        self.wake()
        self._fabric.stir()

    def record(self, comm: int) -> int:
        self._enter("record")
        found = self._comm(comm)
        _rule(found.state is _State.SETTLED, "an event before its group lies on the device")
        event = self._fabric.next_number()
        self._events[event] = [kernel for lying in found.lying.values() for kernel in lying]
        return event

    def is_over(self, event: int) -> bool:
        self._enter("is_over")
        if any(not kernel.is_over for kernel in self._events[event]):
            return False
        del self._events[event]
        return True

    def revoke(self, comm: int) -> None:
        self._enter("revoke")
        if self._is_dead:
            return
        found = self._comm(comm)
        _rule(found.state not in (_State.REVOKED, _State.ABORTING), "revoked twice")
        self._ops = None
        found.state = _State.REVOKED
        for lying in found.lying.values():
            for kernel in lying:
                self._fabric.schedule(self._fabric.delay(), lambda kernel=kernel: self._fabric.end(kernel))  # type: ignore[misc]
        self._fabric.tell_lost(found)

    def abort(self, comm: int) -> None:
        self._enter("abort")
        if self._is_dead:
            return
        found = self._comm(comm)
        _rule(found.state is _State.REVOKED, "an abort before what waits for the peer was revoked")
        found.state = _State.ABORTING
        self._aborts.append((found, [kernel for lane in self.lanes.values() for kernel in lane]))
        self._fabric.schedule(self._fabric.delay(), self.go_on_with_aborts)

    def is_aborted(self, comm: int) -> bool:
        self._enter("is_aborted")
        if self._is_dead:
            return True
        found = self.comms[comm]
        _rule(found.state in (_State.ABORTING, _State.GONE), "nobody aborts it")
        if found.state is _State.GONE:
            del self.comms[comm]
        return found.state is _State.GONE

    # --- the device

    def go_on_with_aborts(self) -> None:
        """Those that nothing blocks any longer end."""
        for entry in list(self._aborts):
            comm, kernels = entry
            if all(kernel.is_over for kernel in kernels):
                self._aborts.remove(entry)
                wait_s = self._fabric.delay() if self.abort_takes_s is None else self.abort_takes_s
                self._fabric.schedule(wait_s, lambda comm=comm: self._freed(comm))  # type: ignore[misc]

    def _freed(self, comm: _Comm) -> None:
        comm.state = _State.GONE
        self.wake()

    def read(self, op: _Op) -> bytes:
        """For a send, now."""
        if op.span is None:
            return bytes(op.num_bytes)
        if self._watch is not None and not op.memory.is_staged(op.span):
            self._watch.device_reads(op.span)
        return bytes(op.memory.at(op.span))

    def write(self, op: _Op, payload: bytes) -> None:
        """A receive, now."""
        assert op.span is not None
        if self._watch is not None:
            self._watch.device_writes(op.span)
        op.memory.at(op.span)[:] = payload

    def die(self) -> None:
        """The process is gone, as by kill -9, and its kernels with it."""
        self._is_dead = True
        for comm in self.comms.values():
            if comm.state is _State.GONE:
                continue
            comm.state = _State.GONE
            for lying in comm.lying.values():
                for kernel in list(lying):
                    self._fabric.end(kernel)
            self._fabric.tell_lost(comm)

    def _comm(self, comm: int) -> _Comm:
        found = self.comms[comm]
        _rule(found.state not in (_State.ABORTING, _State.GONE), "a communicator that was aborted")
        return found

    def _enter(self, call: str) -> None:
        here = threading.get_ident()
        self._thread = self._thread or here
        _rule(self._thread == here, f"{call}: a call from another thread")
        if call in self.fails:
            raise nccl_failed(call, self.fails.pop(call))


def _other(way: Way) -> Way:
    return Way.RECEIVE if way is Way.SEND else Way.SEND
