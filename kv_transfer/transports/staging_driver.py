"""Copies between a GPU's pool and the host, by CUDA's driver API."""

from __future__ import annotations

import ctypes

from kv_transfer.transports.cuda_driver import CudaDriver
from pdserve.kv_memory import ByteSpan, DeviceMemory


class DriverCopies:
    """HostCopies (staging_port.py) on the device of `memory`."""

    def __init__(self, cuda: CudaDriver, memory: DeviceMemory) -> None:
        self._cuda = cuda
        self._memory = memory
        self._pinned = 0
        self._stream: int | None = None

    def pin(self, num_bytes: int) -> memoryview:
        self._cuda.enter()
        self._pinned = self._cuda.pin(num_bytes)
        return memoryview((ctypes.c_ubyte * num_bytes).from_address(self._pinned)).cast("B")

    def share(self, pinned: memoryview) -> None:
        """What another device's `pin` gave, in place of its own: it is pinned for all of them."""
        self._pinned = ctypes.addressof(ctypes.c_char.from_buffer(pinned))

    def fetch(self, span: ByteSpan, into: int) -> None:
        self._copy(self._pinned + into, self._memory.device_address(span), span.num_bytes)

    def store(self, start: int, into: ByteSpan) -> None:
        self._copy(self._memory.device_address(into), self._pinned + start, into.num_bytes)

    def _copy(self, target: int, source: int, num_bytes: int) -> None:
        self._cuda.enter()
        self._cuda.copy(target, source, num_bytes, self._copies())

    def record(self) -> int:
        self._cuda.enter()
        return self._cuda.record(self._copies())

    def is_over(self, event: int) -> bool:
        self._cuda.enter()
        return self._cuda.is_over(event)

    def _copies(self) -> int:
        if self._stream is None:
            self._stream = self._cuda.make_stream()
        return self._stream
