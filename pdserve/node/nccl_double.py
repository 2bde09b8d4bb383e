"""NCCL without devices, between processes of one host, to try what a cluster over NCCL does (PDSERVE_NCCL=double).

A communicator is a memfd of its receiver, which the sender opens by way of /proc: its name goes with its processes. The
device is two threads, one for sends and one for receives. They move the bytes whatever the transfer owner does, and
nothing but the end of a group, or its revocation, ends them; an abort waits for all that the device has in hand.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import NamedTuple

from kv_transfer.frames import MAX_PIECE_BYTES, UNIQUE_ID_BYTES
from kv_transfer.transports.nccl_port import RECEIVER_RANK, SENDER_RANK, nccl_failed
from pdserve.errors import InvariantViolated
from pdserve.kv_memory import ByteSpan, KvMemory

_JOINED = {SENDER_RANK: 0, RECEIVER_RANK: 8}  # offsets in the memfd, of 64-bit numbers
_NUMBER, _FILLED, _EMPTIED, _SIZE = 16, 24, 32, 40
_PAYLOAD = 4096
_FILE_BYTES = _PAYLOAD + MAX_PIECE_BYTES
_LOOK_S = 0.0005  # how often a device looks at what the other end does


class _Op(NamedTuple):
    address: int
    num_bytes: int


@dataclass(slots=True, eq=False)
class _Group:
    comm: _Comm
    ops: list[_Op] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)


class _Comm:
    """One end of a communicator."""

    def __init__(self, unique_id: bytes, rank: int) -> None:
        self.rank = rank
        self.revoked = threading.Event()
        self.freed = threading.Event()
        number, path = struct.unpack_from("<Q", unique_id)[0], unique_id[8:].rstrip(b"\0").decode()
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise nccl_failed("init", f"{path}: {error.strerror}") from error
        try:
            if os.fstat(descriptor).st_size != _FILE_BYTES:
                raise nccl_failed("init", f"{path} is no communicator")
            self._map = mmap.mmap(descriptor, _FILE_BYTES)
        finally:
            os.close(descriptor)
        if self._get(_NUMBER) != number:
            raise nccl_failed("init", f"{path} is another communicator by now")
        self._slot: ctypes.c_char | None = ctypes.c_char.from_buffer(self._map, _PAYLOAD)
        self._payload = ctypes.addressof(self._slot)
        self._put(_JOINED[rank], 1)

    def free(self) -> None:
        """Nothing on the device uses it any longer."""
        self._slot = None
        self._map.close()
        self.freed.set()

    def _get(self, at: int) -> int:
        found: int = struct.unpack_from("<Q", self._map, at)[0]
        return found

    def _put(self, at: int, value: int) -> None:
        struct.pack_into("<Q", self._map, at, value)

    @property
    def is_made(self) -> bool:
        return all(self._get(at) for at in _JOINED.values())

    def send(self, op: _Op) -> None:
        """Into the one slot there is. Returns when the other end has taken it, or this one is revoked."""
        ctypes.memmove(self._payload, op.address, op.num_bytes)
        self._put(_SIZE, op.num_bytes)
        filled = self._get(_FILLED) + 1
        self._put(_FILLED, filled)
        self._wait(lambda: self._get(_EMPTIED) == filled)

    def receive(self, op: _Op) -> None:
        emptied = self._get(_EMPTIED) + 1
        if self._wait(lambda: self._get(_FILLED) == emptied):
            size = self._get(_SIZE)
            if size != op.num_bytes:
                raise InvariantViolated("a send that fits no receive", sent=size, wanted=op.num_bytes)
            ctypes.memmove(op.address, self._payload, op.num_bytes)
            self._put(_EMPTIED, emptied)

    def _wait(self, is_so: Callable[[], bool]) -> bool:
        while not is_so():
            if self.revoked.wait(_LOOK_S):
                return False
        return True


class NcclDouble:
    """Nccl (kv_transfer/transports/nccl_port.py) for memory that the host sees. One for a process."""

    def __init__(self, memory: KvMemory) -> None:
        self._memory = memory
        self._num_made = 0
        self._ids: dict[int, int] = {}  # descriptors of ids that this process has made, by their number
        self._comms: dict[int, _Comm] = {}
        self._events: dict[int, list[_Group]] = {}
        self._on_device: list[_Group] = []
        self._group: _Group | None = None
        self._blank = ctypes.create_string_buffer(MAX_PIECE_BYTES)
        self._streams: dict[int, SimpleQueue[_Group]] = {}
        for rank, name in ((SENDER_RANK, "nccl-sends"), (RECEIVER_RANK, "nccl-receives")):
            stream = self._streams[rank] = SimpleQueue[_Group]()
            threading.Thread(target=_run, args=(stream,), name=name, daemon=True).start()

    def make_unique_id(self) -> bytes:
        number = self._next_number()
        descriptor = self._ids[number] = os.memfd_create("nccl-double", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, _FILE_BYTES)
        os.pwrite(descriptor, struct.pack("<Q", number), _NUMBER)
        path = f"/proc/{os.getpid()}/fd/{descriptor}".encode()
        return struct.pack("<Q", number) + path.ljust(UNIQUE_ID_BYTES - 8, b"\0")

    def init(self, unique_id: bytes, rank: int) -> int:
        comm = self._next_number()
        self._comms[comm] = _Comm(unique_id, rank)
        if rank == RECEIVER_RANK:
            self._ids[comm] = self._ids.pop(struct.unpack_from("<Q", unique_id)[0])
        return comm

    def is_settled(self, comm: int) -> bool:
        return self._comms[comm].is_made

    def begin_group(self) -> None:
        if self._group is not None:
            raise InvariantViolated("a group in a group")

    def send(self, comm: int, span: ByteSpan) -> None:
        self._add(comm, _Op(self._memory.address(span), span.num_bytes))

    def send_blank(self, comm: int, num_bytes: int) -> None:
        self._add(comm, _Op(ctypes.addressof(self._blank), num_bytes))

    def receive(self, comm: int, into: ByteSpan) -> None:
        self._add(comm, _Op(self._memory.address(into), into.num_bytes))

    def _add(self, comm: int, op: _Op) -> None:
        found = self._comms[comm]
        self._group = self._group or _Group(found)
        if self._group.comm is not found:
            raise InvariantViolated("a group of two communicators")
        self._group.ops.append(op)

    def end_group(self, comm: int) -> None:
        group, self._group = self._group, None
        assert group is not None
        self._on_device = [other for other in self._on_device if not other.over.is_set()]
        self._on_device.append(group)
        self._streams[group.comm.rank].put(group)

    def record(self, comm: int) -> int:
        event = self._next_number()
        self._events[event] = [group for group in self._on_device if group.comm is self._comms[comm]]
        return event

    def is_over(self, event: int) -> bool:
        if not all(group.over.is_set() for group in self._events[event]):
            return False
        del self._events[event]
        return True

    def revoke(self, comm: int) -> None:
        self._group = None
        self._comms[comm].revoked.set()

    def abort(self, comm: int) -> None:
        found, before = self._comms[comm], list(self._on_device)

        def abort() -> None:
            for group in before:
                group.over.wait()
            found.free()

        threading.Thread(target=abort, name="nccl-abort", daemon=True).start()

    def is_aborted(self, comm: int) -> bool:
        if not self._comms[comm].freed.is_set():
            return False
        del self._comms[comm]
        if comm in self._ids:
            os.close(self._ids.pop(comm))
        return True

    def _next_number(self) -> int:
        self._num_made += 1
        return self._num_made


def _run(stream: SimpleQueue[_Group]) -> None:
    """What a device does with one of its streams."""
    while True:
        group = stream.get()
        move = group.comm.send if group.comm.rank == SENDER_RANK else group.comm.receive
        for op in group.ops:
            if group.comm.revoked.is_set():
                break
            move(op)
        group.over.set()
