"""CUDA IPC without devices, between processes of one host, to try what a cluster does over it: PDSERVE_CUDA_IPC=double.

A pool is a memfd, which others open by way of /proc: its name goes with its process, what is mapped stays.
What CUDA would leave undefined raises InvariantViolated.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

from kv_transfer.transports.port import RemoteRead
from kv_transfer.transports.remote_reads import joined
from pdserve.errors import InvalidRequest, InvariantViolated, WorkerLost
from pdserve.kv_memory import ByteSpan, KvMemory
from pdserve.memfd import MEMFD, MappedPool
from pdserve.node.stream_double import CopyDouble, StreamDouble

_INODE = struct.Struct("<Q")


@dataclass(slots=True, eq=False)
class _Mapped:
    handle: bytes
    pool: MappedPool
    copies: list[CopyDouble] = field(default_factory=list)


class CudaIpcDouble:
    """CudaIpc (kv_transfer/transports/cuda_ipc_port.py) for memory that others may map. One for a process."""

    def __init__(self, memory: KvMemory) -> None:
        self._memory = memory
        self._num_mapped = 0
        self._mapped: dict[int, _Mapped] = {}
        self._stream = StreamDouble("cuda-copies")

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
        self._num_mapped += 1
        self._mapped[self._num_mapped] = _Mapped(handle, pool)
        return self._num_mapped

    def close(self, mapping: int) -> None:
        found = self._mapped.pop(mapping)
        if not all(copy.over.is_set() for copy in found.copies):
            raise InvariantViolated("a pool unmapped under a copy")
        found.pool.close()

    def copy(self, mapping: int, reads: Sequence[RemoteRead]) -> None:
        found = self._mapped[mapping]
        runs = list(joined(reads))
        found.copies = [copy for copy in found.copies if not copy.over.is_set()]
        found.copies.append(self._stream.begin(lambda: self._read(found.pool, runs)))

    def record(self) -> int:
        return self._stream.record()

    def is_over(self, event: int) -> bool:
        return self._stream.is_over(event)

    def _read(self, pool: MappedPool, runs: list[RemoteRead]) -> None:
        for run in runs:
            self._copy(pool, *run)

    def _copy(self, pool: MappedPool, start: int, into: int, num_bytes: int) -> None:
        source = pool.address(ByteSpan(start, num_bytes))
        ctypes.memmove(self._memory.address(ByteSpan(into, num_bytes)), source, num_bytes)
