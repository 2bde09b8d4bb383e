"""CUDA IPC without devices, between processes of one host, to try what a cluster does over it: PDSERVE_CUDA_IPC=double.

A pool is a memfd, which others open by way of /proc: its name goes with its process, what is mapped stays. The device
is a thread that copies whatever the transfer owner does. What CUDA would leave undefined raises InvariantViolated.
"""

from __future__ import annotations

import ctypes
import os
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue

from kv_transfer.transports.port import RemoteRead
from kv_transfer.transports.remote_reads import joined
from pdserve.errors import InvalidRequest, InvariantViolated, WorkerLost
from pdserve.kv_memory import ByteSpan, KvMemory
from pdserve.memfd import MEMFD, MappedPool

_INODE = struct.Struct("<Q")


@dataclass(slots=True, eq=False)
class _Mapped:
    handle: bytes
    pool: MappedPool


@dataclass(slots=True, eq=False)
class _Copies:
    source: _Mapped
    reads: list[RemoteRead]
    over: threading.Event = field(default_factory=threading.Event)


class CudaIpcDouble:
    """CudaIpc (kv_transfer/transports/cuda_ipc_port.py) for memory that others may map. One for a process."""

    def __init__(self, memory: KvMemory) -> None:
        self._memory = memory
        self._num_made = 0
        self._mapped: dict[int, _Mapped] = {}
        self._events: dict[int, list[_Copies]] = {}
        self._on_device: list[_Copies] = []
        self._stream: SimpleQueue[_Copies] = SimpleQueue()
        threading.Thread(target=self._run, name="cuda-copies", daemon=True).start()

    def export(self) -> bytes:
        descriptor = self._memory.export(MEMFD)
        if descriptor is None:
            raise WorkerLost("the pool can't be mapped by others", device=self._memory.device)
        return _INODE.pack(os.fstat(descriptor).st_ino) + f"/proc/{os.getpid()}/fd/{descriptor}".encode()

    def open(self, handle: bytes, num_bytes: int) -> int:
        if any(mapped.handle == handle for mapped in self._mapped.values()):
            raise InvariantViolated("a pool mapped twice")
        number, path = handle[: _INODE.size], handle[_INODE.size :]
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except (OSError, ValueError) as error:
            raise InvalidRequest(
                "the peer's pool can't be mapped", path=path.decode(errors="replace"), error=error
            ) from error
        try:
            if _INODE.pack(os.fstat(descriptor).st_ino) != number:
                raise InvalidRequest("the peer's pool can't be mapped", reason="it is another's by now")
            pool = MappedPool(descriptor, num_bytes)
        finally:
            os.close(descriptor)
        self._mapped[self._next_number()] = _Mapped(handle, pool)
        return self._num_made

    def close(self, mapping: int) -> None:
        found = self._mapped.pop(mapping)
        if any(copies.source is found and not copies.over.is_set() for copies in self._on_device):
            raise InvariantViolated("a pool unmapped under a copy")
        found.pool.close()

    def copy(self, mapping: int, reads: Sequence[RemoteRead]) -> None:
        copies = _Copies(self._mapped[mapping], list(joined(reads)))
        self._on_device = [other for other in self._on_device if not other.over.is_set()]
        self._on_device.append(copies)
        self._stream.put(copies)

    def record(self) -> int:
        self._events[self._next_number()] = list(self._on_device)
        return self._num_made

    def is_over(self, event: int) -> bool:
        if not all(copies.over.is_set() for copies in self._events[event]):
            return False
        del self._events[event]
        return True

    def _next_number(self) -> int:
        self._num_made += 1
        return self._num_made

    def _run(self) -> None:
        """What a device does with its stream of copies."""
        while True:
            copies = self._stream.get()
            for read in copies.reads:
                self._copy(copies.source.pool, *read)
            copies.over.set()

    def _copy(self, pool: MappedPool, start: int, into: int, num_bytes: int) -> None:
        source = pool.address(ByteSpan(start, num_bytes))
        ctypes.memmove(self._memory.address(ByteSpan(into, num_bytes)), source, num_bytes)
