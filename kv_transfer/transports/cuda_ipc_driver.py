"""CUDA IPC itself, by CUDA's driver API: the pool's allocation is exported whole, and where in it the pool begins."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence

from kv_transfer.transports.cuda_driver import CudaDriver
from kv_transfer.transports.port import RemoteRead
from kv_transfer.transports.remote_reads import joined
from pdserve.errors import InvalidRequest
from pdserve.kv_memory import ByteSpan, DeviceMemory

_IPC_BYTES = 64
_HANDLE = struct.Struct(
    f"<16sQ{_IPC_BYTES}s"
)  # the GPU's UUID, the pool's offset in its allocation, CUDA's handle
_LAZY_PEER_ACCESS = 1


class IpcHandle(ctypes.Structure):
    """CUipcMemHandle, which goes by value."""

    _fields_ = (("reserved", ctypes.c_char * _IPC_BYTES),)


class DriverIpc:
    """CudaIpc (cuda_ipc_port.py) on the device of `memory`."""

    def __init__(self, cuda: CudaDriver, memory: DeviceMemory) -> None:
        self._cuda = cuda
        self._pool = memory.device_address(ByteSpan(0, memory.num_bytes))
        self._stream: int | None = None
        self._mapped: dict[int, tuple[int, int]] = {}  # where an allocation lies here, and the pool in it
        self._num_mapped = 0

    def export(self) -> bytes:
        self._cuda.enter()
        base, _size = _range(self._cuda, self._pool)
        handle = IpcHandle()
        self._cuda.call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(base))
        return _HANDLE.pack(self._cuda.uuid(), self._pool - base, bytes(handle))

    def open(self, handle: bytes, num_bytes: int) -> int:
        found = map_exported(self._cuda, handle, num_bytes)
        self._num_mapped += 1
        self._mapped[self._num_mapped] = found
        return self._num_mapped

    def close(self, mapping: int) -> None:
        self._cuda.enter()
        base, _pool = self._mapped.pop(mapping)
        self._cuda.call("cuIpcCloseMemHandle", ctypes.c_uint64(base))

    def copy(self, mapping: int, reads: Sequence[RemoteRead]) -> None:
        self._cuda.enter()
        _base, theirs = self._mapped[mapping]
        for start, into, num_bytes in joined(reads):
            self._cuda.copy(self._pool + into, theirs + start, num_bytes, self._copies())

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


def map_exported(cuda: CudaDriver, handle: bytes, num_bytes: int) -> tuple[int, int]:
    """Map a pool of so many bytes that another process exported: where its allocation lies here, and the pool in it.

    Raises InvalidRequest: why it can't be mapped here; WorkerLost with CUDA's words.
    """
    if len(handle) != _HANDLE.size:
        raise _unfit("it isn't named as one on a GPU is", got=len(handle), want=_HANDLE.size)
    uuid, offset, ipc = _HANDLE.unpack(handle)
    if why := cuda.unreachable(uuid):
        raise _unfit(why, gpu=uuid.hex())
    cuda.enter()
    at = ctypes.c_uint64()
    cuda.call("cuIpcOpenMemHandle_v2", ctypes.byref(at), IpcHandle.from_buffer_copy(ipc), _LAZY_PEER_ACCESS)
    base, size = _range(cuda, at.value)
    if offset + num_bytes > size:
        cuda.call("cuIpcCloseMemHandle", at)
        raise _unfit("another size", want=num_bytes, got=size - offset)
    return base, base + offset


def _range(cuda: CudaDriver, address: int) -> tuple[int, int]:
    """Of the allocation that the address is in: where it begins, and its bytes."""
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    cuda.call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
    return base.value, size.value


def _unfit(reason: str, **fields: object) -> InvalidRequest:
    return InvalidRequest("the peer's pool can't be mapped", reason=reason, **fields)
