"""A KV pool that other workers of the same host may map, and such a pool as they see it.

The pool lies in a memfd: memory with a descriptor and no name. It is sealed, so that nobody, its owner included, can
shrink it under a reader (whose access would kill it), and its pages live until the last mapping is gone: a reader that
is in the middle of a copy when the owner dies reads on.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import weakref

import structlog

from pdserve.errors import InvalidRequest, InvariantViolated
from pdserve.kv_memory import ByteSpan, HostMemory
from pdserve.shared_mapping import SharedMapping

MEMFD = "memfd"
_NO_RESIZE = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_F_SEAL_FUTURE_WRITE = 0x10  # Linux 5.1: no new writable mapping; not in the fcntl module yet

log = structlog.get_logger()


def shareable_memory(num_bytes: int) -> HostMemory:
    """Memory that others may map, where the system can make it; else memory of this process alone, logged."""
    try:
        return MemfdMemory(num_bytes)
    except (OSError, AttributeError) as error:  # AttributeError: a system without memfd_create
        log.warning("pool.not_shareable", reason=str(error))
        return HostMemory(num_bytes)


class MemfdMemory(HostMemory):
    """On huge pages: those that the system holds ready, else what it can collapse. Raises OSError.

    descriptor  stays this memory's
    """

    def __init__(self, num_bytes: int, *, others_write: bool = False) -> None:
        """others_write: other processes may map it to write, until `seal_writes`."""
        try:
            descriptor, self._mapping = _map_new(num_bytes, os.MFD_HUGETLB)
        except OSError:  # none, or not enough, are reserved
            descriptor, self._mapping = _map_new(num_bytes, 0)
        weakref.finalize(self, os.close, descriptor)
        self.descriptor = descriptor
        if not others_write:
            self.seal_writes()
        super().__init__(num_bytes, self._mapping.view())

    def seal_writes(self) -> None:
        """Nobody can map it to write, or resize it, from now on; who has mapped it may go on writing. Once."""
        try:
            fcntl.fcntl(
                self.descriptor, fcntl.F_ADD_SEALS, _NO_RESIZE | _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL
            )
        except OSError:
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _NO_RESIZE | fcntl.F_SEAL_SEAL)

    def _make_huge(self, end: int) -> int:
        return self._mapping.collapse(end)

    def export(self, transport: str) -> int | None:
        return self.descriptor if transport == MEMFD else None


class RankMemory(HostMemory):
    """Another rank's `MemfdMemory`, to write as that one does. Raises OSError."""

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        """descriptor: from now on this memory's, which closes it."""
        try:
            self._mapping = SharedMapping(descriptor, os.fstat(descriptor).st_size, writable=True)
        finally:
            os.close(descriptor)
        super().__init__(num_bytes, self._mapping.view())

    def _make_huge(self, end: int) -> int:
        return self._mapping.collapse(end)


def _map_new(num_bytes: int, flags: int) -> tuple[int, SharedMapping]:
    descriptor = os.memfd_create("pdserve-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)
    try:
        page_bytes = os.fstat(descriptor).st_blksize if flags else mmap.PAGESIZE
        size = -(-num_bytes // page_bytes) * page_bytes
        os.ftruncate(descriptor, size)
        return descriptor, SharedMapping(descriptor, size, writable=True)
    except OSError:
        os.close(descriptor)
        raise


class MappedPool:
    """Another worker's pool, mapped read-only. One thread at a time."""

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        """descriptor: came from a peer and is checked here; it stays the caller's. num_bytes: of that pool.

        Raises InvalidRequest, with what is wrong with it.
        """
        try:
            seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        except OSError as error:
            raise _unfit("not a memfd") from error
        if seals & _NO_RESIZE != _NO_RESIZE:
            raise _unfit("not sealed against another size", seals=seals)
        found = os.fstat(descriptor)
        if not num_bytes <= found.st_size < num_bytes + max(found.st_blksize, mmap.PAGESIZE):
            raise _unfit("another size", want=num_bytes, got=found.st_size)
        try:
            self._mapping = SharedMapping(descriptor, found.st_size, writable=False)
        except OSError as error:
            raise _unfit("it can't be mapped", error=error.strerror) from error
        self._num_bytes = num_bytes
        self._address = self._mapping.address

    def address(self, span: ByteSpan) -> int:
        """Where the bytes of a span lie in this process. Raises InvariantViolated if they aren't in the pool."""
        if not 0 <= span.start <= span.end <= self._num_bytes:
            raise InvariantViolated("a read outside of the peer's pool", span=span)
        return self._address + span.start

    def close(self) -> None:
        """Nothing may be read from here on. Idempotent."""
        self._num_bytes = -1
        self._mapping.close()


def _unfit(reason: str, **fields: object) -> InvalidRequest:
    return InvalidRequest("the peer's memory can't be mapped", reason=reason, **fields)
