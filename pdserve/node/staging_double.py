"""Pinned staging without a device, to try what a cluster does with it: PDSERVE_STAGING=double.

The pool is an ordinary one, which the links may not look at; a thread copies between it and the staging memory.
"""

from __future__ import annotations

from pdserve.kv_memory import ByteSpan, KvMemory
from pdserve.node.stream_double import StreamDouble


class StagingDouble:
    """HostCopies (kv_transfer/transports/staging_port.py) for memory of the host."""

    def __init__(self, memory: KvMemory) -> None:
        self._memory = memory
        self._pinned = memoryview(b"")
        self._stream = StreamDouble("staging-copies")

    def pin(self, num_bytes: int) -> memoryview:
        self._pinned = memoryview(bytearray(num_bytes))
        return self._pinned

    def share(self, pinned: memoryview) -> None:
        """What another one's `pin` gave, in place of its own."""
        self._pinned = pinned

    def fetch(self, span: ByteSpan, into: int) -> None:
        pinned = self._pinned[into : into + span.num_bytes]
        self._stream.begin(lambda: self._copy(pinned, self._memory.view(span)))

    def store(self, start: int, into: ByteSpan) -> None:
        pinned = self._pinned[start : start + into.num_bytes]
        self._stream.begin(lambda: self._copy(self._memory.view(into), pinned))

    def _copy(self, target: memoryview, source: memoryview) -> None:
        target[:] = source

    def record(self) -> int:
        return self._stream.record()

    def is_over(self, event: int) -> bool:
        return self._stream.is_over(event)
