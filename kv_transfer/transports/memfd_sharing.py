"""How P's pool is passed over a Unix connection: its memfd travels once beside a frame, D maps it and copies."""

from __future__ import annotations

import array
import ctypes
import os
import socket
from collections.abc import Callable, Iterable, Sequence
from operator import add

from kv_transfer.transports.port import RemoteRead
from kv_transfer.transports.remote_reads import joined
from pdserve.errors import InvalidRequest, InvariantViolated
from pdserve.kv_memory import ByteSpan, KvMemory
from pdserve.memfd import MEMFD, MappedPool

_DESCRIPTOR_BYTES = array.array("i").itemsize
_ROOM = socket.CMSG_SPACE(4 * _DESCRIPTOR_BYTES)
"""Room for more than the one that is right: several are seen as several, and all closed."""

Ancillary = tuple[int, int, bytes]


class MemfdSharing:
    """One end of one connection. send: queues a frame with a descriptor beside it.

    ancillary_bytes  room for descriptors in the next read; 0: what is passed unasked stays with the kernel
    """

    kind = MEMFD
    is_at_once = True
    is_idle = True

    def __init__(self, memory: KvMemory, send: Callable[[bytes, int | None], None]) -> None:
        self.ancillary_bytes = 0
        self.is_read = False
        self._memory = memory
        self._send = send
        self._came: list[int] = []
        self._pool: MappedPool | None = None

    # --- P

    def export(self) -> bytes:
        return b""

    def pass_memory(self, wire: bytes) -> None:
        self._send(wire, self._memory.export(MEMFD))

    def begin(self) -> None:
        self.is_read = True

    # --- D

    def expect_memory(self) -> None:
        self.ancillary_bytes = _ROOM

    def arrived(self, ancillary: Iterable[Ancillary]) -> None:
        """What came beside the bytes of a read."""
        for level, kind, raw in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                whole = len(raw) // _DESCRIPTOR_BYTES * _DESCRIPTOR_BYTES
                self._came += array.array("i", raw[:whole])

    def take_memory(self, handle: bytes, num_bytes: int) -> None:
        self.ancillary_bytes = 0
        descriptors, self._came = self._came, []
        try:
            if len(descriptors) != 1:
                raise InvalidRequest(
                    "the peer's memory can't be mapped", reason="want one descriptor", got=len(descriptors)
                )
            self._pool = MappedPool(descriptors[0], num_bytes)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        self.is_read = True

    def read(self, tag: int, reads: Sequence[RemoteRead]) -> bool:
        """At the speed of memory; other threads of the process run meanwhile."""
        if self._pool is None:
            raise InvariantViolated("the peer's pool isn't mapped", tag=tag)
        starts, targets, lengths = zip(*reads)
        theirs, ours = _origin(self._pool, starts, lengths), _origin(self._memory, targets, lengths)
        for start, into, num_bytes in joined(reads):
            ctypes.memmove(ours + into, theirs + start, num_bytes)
        return True

    def take_over(self) -> Sequence[int]:
        return ()

    # --- the end

    def close(self) -> None:
        """Idempotent. Nothing is read from here on."""
        self.ancillary_bytes = 0
        for descriptor in self._came:
            os.close(descriptor)
        self._came.clear()
        if self._pool is not None:
            self._pool.close()


def _origin(memory: KvMemory | MappedPool, starts: Sequence[int], lengths: Sequence[int]) -> int:
    """Where its byte 0 lies. All spans are looked at as one: that costs a fraction of a look at each."""
    low = min(starts)
    return memory.address(ByteSpan(low, max(map(add, starts, lengths)) - low)) - low
