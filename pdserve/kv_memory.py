"""KV memory as the links see it: spans of bytes, on whatever device they lie."""

from __future__ import annotations

import mmap
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from xxhash import xxh3_64_intdigest

from pdserve.errors import InvariantViolated

XXH3_64 = "xxh3_64"


@dataclass(frozen=True, slots=True)
class ByteSpan:
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

    def checksum(self, kind: str, span: ByteSpan) -> int:
        """Checksum of one of `checksums`, in [0, 2**64)."""
        ...

    def export(self, transport: str) -> int | None:
        """What a peer on this host needs to read this memory itself over that transport; None: it can't.

        "memfd": a descriptor, which stays this memory's.
        """
        ...


class HostMemory:
    """Zeroed memory that costs nothing until touched, on huge pages where the system has them.

    memory  a mapping to lie in; None: one of this process alone
    """

    device = "cpu"
    checksums = (XXH3_64,)

    def __init__(self, num_bytes: int, memory: mmap.mmap | None = None) -> None:
        self.num_bytes = num_bytes
        memory = memory or mmap.mmap(-1, num_bytes)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel built without them: small pages do too
                memory.madvise(mmap.MADV_HUGEPAGE)
        #: all of it, writable, for the engine
        self.bytes = memoryview(memory)[:num_bytes]

    def view(self, span: ByteSpan) -> memoryview:
        if not 0 <= span.start <= span.end <= self.num_bytes:
            raise InvariantViolated("a span outside of the pool", span=span, num_bytes=self.num_bytes)
        return self.bytes[span.start : span.end]

    def checksum(self, kind: str, span: ByteSpan) -> int:
        if kind != XXH3_64:
            raise InvariantViolated("a checksum that this memory doesn't offer", kind=kind)
        return xxh3_64_intdigest(self.view(span))

    def export(self, transport: str) -> int | None:
        return None
