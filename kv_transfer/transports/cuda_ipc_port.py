"""What the links need of CUDA to read another process's pool on the same host: half a dozen calls on one device.

All are made by the transfer owner's thread. None waits for the device; `open` may take milliseconds, once for a peer.
A call that fails raises WorkerLost with CUDA's own words. Mappings and events are numbers, never reused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kv_transfer.transports.device_copies import CopyEvents
from kv_transfer.transports.port import RemoteRead

CUDA_IPC = "cuda_ipc"


class CudaIpc(CopyEvents, Protocol):
    """Copies are done in the order in which they were begun, on a stream of their own."""

    def export(self) -> bytes:
        """Names this process's pool to others of the host, at most MAX_HANDLE_BYTES. Once."""
        ...

    def open(self, handle: bytes, num_bytes: int) -> int:
        """Map a pool of so many bytes that another process exported; not one that is mapped already.

        Raises InvalidRequest: why it can't be mapped here.
        """
        ...

    def close(self, mapping: int) -> None:
        """No copy from it is under way, and none follows."""
        ...

    def copy(self, mapping: int, reads: Sequence[RemoteRead]) -> None:
        """Begin to copy from it into this process's pool."""
        ...
