"""What staging needs of a device: pinned memory, and copies between it and the pool.

All calls are made by the transfer owner's thread, and none waits for the device; but `pin`, once, before the links
begin. A call that fails raises WorkerLost with CUDA's own words.
"""

from __future__ import annotations

from typing import Protocol

from kv_transfer.transports.device_copies import CopyEvents
from pdserve.kv_memory import ByteSpan


class HostCopies(CopyEvents, Protocol):
    """Copies are done in the order in which they were begun, on a stream of their own."""

    def pin(self, num_bytes: int) -> memoryview:
        """Memory of the host that the device copies to and from while the host does other work. Once."""
        ...

    def fetch(self, span: ByteSpan, into: int) -> None:
        """Begin to copy from the pool into the pinned memory, to this byte of it on."""
        ...

    def store(self, start: int, into: ByteSpan) -> None:
        """Begin to copy from the pinned memory, from this byte of it on, into the pool."""
        ...
