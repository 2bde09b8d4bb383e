"""KV memory as the links see it: spans of bytes, on whatever device they lie."""

from __future__ import annotations

import ctypes
import mmap
from contextlib import suppress
from typing import NamedTuple, Protocol, runtime_checkable

from xxhash import xxh3_64_intdigest

from pdserve.errors import InvariantViolated
from pdserve.memory_pages import HUGE_BYTES, populated

XXH3_64 = "xxh3_64"


class ByteSpan(NamedTuple):  # not a dataclass: one is made for each piece that moves
    """A run of bytes of a KV memory, by where it begins; what it means is the layout's."""

    start: int
    num_bytes: int

    @property
    def end(self) -> int:
        return self.start + self.num_bytes


class KvMemory(Protocol):
    """The memory of a KV pool. The transfer owner reads and writes it block by block; it lives as long as its engine.

    A span outside of it is a bug: InvariantViolated, or an IndexError of what is below.
    """

    @property
    def num_bytes(self) -> int: ...

    @property
    def device(self) -> str:
        """ "cpu", or where else the bytes lie."""
        ...

    @property
    def checksums(self) -> tuple[str, ...]:
        """Kinds of checksums that can be computed where the bytes lie, the best first; () = none."""
        ...

    def view(self, span: ByteSpan) -> memoryview:
        """The bytes of a span as this process's own, writable. Raises InvariantViolated if the host can't see them."""
        ...

    def address(self, span: ByteSpan) -> int:
        """Where the bytes of a span lie in this process, for a copy that takes addresses. Raises as `view`."""
        ...

    def checksum(self, kind: str, span: ByteSpan) -> int | None:
        """Checksum of one of `checksums`, in [0, 2**64); None: where these bytes lie, nobody can compute it."""
        ...

    def populate(self, end: int) -> bool:
        """Have the system find room for the next of the first `end` bytes, so that no write there waits for it.

        One thread. A few milliseconds at most, mostly a fraction of one; other threads run meanwhile.

        returns  whether there is more to do
        """
        ...

    def export(self, transport: str) -> int | None:
        """What a peer on this host needs to read this memory itself over that transport; None: it can't.

        "memfd": a descriptor, which stays this memory's.
        """
        ...


@runtime_checkable
class DeviceMemory(KvMemory, Protocol):
    """One whose bytes lie on a CUDA device: "cuda:N"."""

    def device_address(self, span: ByteSpan) -> int:
        """Where the bytes of a span lie there."""
        ...


class UnseenMemory:
    """What `KvMemory` is where the host can't see it: copied by whoever knows it, without checksums."""

    checksums: tuple[str, ...] = ()

    def __init__(self, num_bytes: int, device: str) -> None:
        self.num_bytes = num_bytes
        self.device = device

    def view(self, span: ByteSpan) -> memoryview:
        raise InvariantViolated("the host can't see the memory of a device", span=span, device=self.device)

    def address(self, span: ByteSpan) -> int:
        raise InvariantViolated("the host can't see the memory of a device", span=span, device=self.device)

    def checksum(self, kind: str, span: ByteSpan) -> int:
        raise InvariantViolated("a checksum that this memory doesn't offer", kind=kind)

    def populate(self, end: int) -> bool:
        return False

    def export(self, transport: str) -> int | None:
        return None


class AddressedMemory(UnseenMemory):
    """Implements `DeviceMemory` by where it begins."""

    def __init__(self, address: int, num_bytes: int, device: str) -> None:
        super().__init__(num_bytes, device)
        self._address = address

    def device_address(self, span: ByteSpan) -> int:
        if not 0 <= span.start <= span.end <= self.num_bytes:
            raise InvariantViolated("a span outside of the pool", span=span, num_bytes=self.num_bytes)
        return self._address + span.start


class HostMemory:
    """Zeroed memory that costs nothing until touched, on huge pages where the system has them.

    memory  where to lie, which nothing may move or end; None: memory of this process alone
    """

    device = "cpu"
    checksums = (XXH3_64,)

    def __init__(self, num_bytes: int, memory: memoryview | None = None) -> None:
        self.num_bytes = num_bytes
        #: all of it, writable, for the engine, which calls `prepare` before it writes
        self.bytes = (private_memory(num_bytes) if memory is None else memory)[:num_bytes]
        self._address = ctypes.addressof((ctypes.c_char * 0).from_buffer(self.bytes))
        self._prepared_bytes = 0
        self._populated_bytes = 0

    def prepare(self, end: int) -> None:
        """The first `end` bytes are about to be used: puts them on huge pages, where that must be asked for."""
        if end > self._prepared_bytes:
            self._prepared_bytes = self._make_huge(end)

    def _make_huge(self, end: int) -> int:
        """How many bytes need no more asking now, `end` at least."""
        return self.num_bytes

    def populate(self, end: int) -> bool:
        start = self._populated_bytes
        if start >= end:
            return False
        stop = min(start + HUGE_BYTES, self.num_bytes)
        self.prepare(stop)
        self._populated_bytes = stop if populated(self._address + start, stop - start) else self.num_bytes
        return self._populated_bytes < end

    def view(self, span: ByteSpan) -> memoryview:
        self._check(span)
        return self.bytes[span.start : span.end]

    def address(self, span: ByteSpan) -> int:
        self._check(span)
        return self._address + span.start

    def _check(self, span: ByteSpan) -> None:
        start, num_bytes = span
        end = start + num_bytes
        if not 0 <= start <= end <= self.num_bytes:
            raise InvariantViolated("a span outside of the pool", span=span, num_bytes=self.num_bytes)
        if end > self._prepared_bytes:
            self.prepare(end)

    def checksum(self, kind: str, span: ByteSpan) -> int:
        if kind != XXH3_64:
            raise InvariantViolated("a checksum that this memory doesn't offer", kind=kind)
        return xxh3_64_intdigest(self.view(span))

    def export(self, transport: str) -> int | None:
        return None


def private_memory(num_bytes: int) -> memoryview:
    """This process's own, zeros, on huge pages where there are any; only what is touched takes memory."""
    memory = mmap.mmap(
        -1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    )  # shared: hardly ever huge pages
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel built without them: small pages do too
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)
