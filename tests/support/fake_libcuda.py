"""libcuda.so.1 for tests, as ctypes calls it: host memory stands for a device's, copies are done once their event is.

Functions are C functions of their real signatures, so that what the caller passes is converted as the driver's would.
A call that a test names in `fails` returns that error once.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_void_p
from typing import Any

from kv_transfer.transports.cuda_ipc_driver import IpcHandle

_INVALID, _NOT_READY = 1, 600


_SIGNATURES: dict[str, list[Any]] = {
    "cuInit": [c_uint],
    "cuDeviceGet": [POINTER(c_int), c_int],
    "cuDeviceGetCount": [POINTER(c_int)],
    "cuDeviceGetUuid_v2": [c_void_p, c_int],
    "cuDeviceCanAccessPeer": [POINTER(c_int), c_int, c_int],
    "cuDevicePrimaryCtxRetain": [POINTER(c_void_p), c_int],
    "cuCtxSetCurrent": [c_void_p],
    "cuStreamCreate": [POINTER(c_void_p), c_uint],
    "cuEventCreate": [POINTER(c_void_p), c_uint],
    "cuEventRecord": [c_void_p, c_void_p],
    "cuEventQuery": [c_void_p],
    "cuEventDestroy_v2": [c_void_p],
    "cuMemGetAddressRange_v2": [POINTER(c_uint64), POINTER(c_size_t), c_uint64],
    "cuMemHostAlloc": [POINTER(c_void_p), c_size_t, c_uint],
    "cuMemcpyAsync": [c_uint64, c_uint64, c_size_t, c_void_p],
    "cuIpcGetMemHandle": [POINTER(IpcHandle), c_uint64],
    "cuIpcOpenMemHandle_v2": [POINTER(c_uint64), IpcHandle, c_uint],
    "cuIpcCloseMemHandle": [c_uint64],
    "cuGetErrorString": [c_int, POINTER(c_char_p)],
}


def _python_name(function: str) -> str:
    """Of the method that stands for it: cuEventDestroy_v2 is _event_destroy."""
    words = re.findall("[A-Z][a-z]*", function.removesuffix("_v2"))
    return "".join("_" + word.lower() for word in words)


class FakeHost:
    """The GPUs of one host, by UUID, and what was allocated on them. peers: whether they reach each other."""

    def __init__(self, *uuids: bytes, peers: bool = True) -> None:
        self.uuids = uuids
        self.peers = peers
        self.allocated: dict[int, ctypes.Array[c_ubyte]] = {}
        self.exported: dict[bytes, int] = {}

    def allocate(self, num_bytes: int) -> int:
        memory = (c_ubyte * num_bytes)()
        address = ctypes.addressof(memory)
        self.allocated[address] = memory
        return address


class FakeLibcuda:
    """One process's. visible: numbers of the host's GPUs that it sees."""

    def __init__(self, host: FakeHost, visible: tuple[int, ...]) -> None:
        self.host = host
        self.fails: dict[str, int] = {}
        self.num_not_ready = 0  # so often an event is asked in vain
        self.mapped: dict[int, int] = {}  # how often
        self._visible = visible
        self._num_made = 0
        self._copies: list[tuple[int, int, int]] = []
        for name, arguments in _SIGNATURES.items():
            setattr(self, name, ctypes.CFUNCTYPE(c_int, *arguments)(self._call(name)))

    def _call(self, name: str) -> Callable[..., int]:
        body = getattr(self, _python_name(name))

        def call(*arguments: Any) -> int:
            return self.fails.pop(name) if name in self.fails else int(body(*arguments) or 0)

        return call

    def _next(self) -> int:
        self._num_made += 1
        return self._num_made

    def _init(self, _flags: int) -> None: ...

    def _device_get(self, device: Any, ordinal: int) -> None:
        device[0] = ordinal

    def _device_get_count(self, count: Any) -> None:
        count[0] = len(self._visible)

    def _device_get_uuid(self, uuid: int, device: int) -> None:
        ctypes.memmove(uuid, self.host.uuids[self._visible[device]], 16)

    def _device_can_access_peer(self, can: Any, _mine: int, _theirs: int) -> None:
        can[0] = int(self.host.peers)

    def _device_primary_ctx_retain(self, context: Any, _device: int) -> None:
        context[0] = self._next()

    def _ctx_set_current(self, context: int) -> int:
        return 0 if context else _INVALID

    def _stream_create(self, stream: Any, _flags: int) -> None:
        stream[0] = self._next()

    def _event_create(self, event: Any, _flags: int) -> None:
        event[0] = self._next()

    def _event_record(self, _event: int, stream: int) -> int:
        return 0 if stream else _INVALID

    def _event_query(self, _event: int) -> int:
        if self.num_not_ready:
            self.num_not_ready -= 1
            return _NOT_READY
        for target, source, num_bytes in self._copies:
            ctypes.memmove(target, source, num_bytes)
        self._copies.clear()
        return 0

    def _event_destroy(self, _event: int) -> None: ...

    def _mem_get_address_range(self, base: Any, size: Any, address: int) -> int:
        for start, memory in self.host.allocated.items():
            if start <= address < start + len(memory):
                base[0], size[0] = start, len(memory)
                return 0
        return _INVALID

    def _mem_host_alloc(self, address: Any, num_bytes: int, _flags: int) -> None:
        address[0] = self.host.allocate(num_bytes)

    def _memcpy_async(self, target: int, source: int, num_bytes: int, stream: int) -> int:
        self._copies.append((target, source, num_bytes))
        return 0 if stream else _INVALID

    def _ipc_get_mem_handle(self, handle: Any, address: int) -> None:
        text = b"handle %d" % address
        ctypes.memmove(handle, text.ljust(64, b"\0"), 64)
        self.host.exported[bytes(handle[0])] = address

    def _ipc_open_mem_handle(self, address: Any, handle: IpcHandle, _flags: int) -> int:
        found = self.host.exported.get(bytes(handle))
        if found is None:
            return _INVALID
        self.mapped[found] = self.mapped.get(found, 0) + 1
        address[0] = found
        return 0

    def _ipc_close_mem_handle(self, address: int) -> int:
        if address not in self.mapped:
            return _INVALID
        self.mapped[address] -= 1
        if not self.mapped[address]:
            del self.mapped[address]
        return 0

    def _get_error_string(self, error: int, words: Any) -> None:
        words[0] = b"error %d of the test" % error
