"""One device by CUDA's driver API: what NCCL, CUDA IPC and staging need of it, and nothing of torch."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Self

from kv_transfer.frames import MAX_PIECE_BYTES
from pdserve.errors import Incompatible, WorkerLost

_LIBRARY = "libcuda.so.1"
_SUCCESS, _NOT_READY = 0, 600
_NON_BLOCKING = 1  # of a stream: it doesn't wait for the default one
_PORTABLE = 1  # of pinned memory: it is that for all devices
_NO_TIMING = 2  # of an event
_UUID_BYTES = 16


class CudaDriver:
    """Cuda (libnccl.py) on the primary context, which torch uses, too. Any thread that has entered."""

    def __init__(self, library: ctypes.CDLL, device: ctypes.c_int, context: ctypes.c_void_p) -> None:
        self._lib = library
        self._device = device
        self._context = context
        self._events: dict[int, ctypes.c_void_p] = {}
        self._num_events = 0
        self._blank: int | None = None

    @classmethod
    def open(cls, ordinal: int, load: Callable[[str], ctypes.CDLL] = ctypes.CDLL) -> Self:
        """The device of this number. load: finds the driver. Raises Incompatible with the driver's words."""
        try:
            library = load(_LIBRARY)
        except OSError as error:
            raise Incompatible("there is no CUDA driver", said=error) from error
        device, context = ctypes.c_int(), ctypes.c_void_p()
        try:
            _call(library, "cuInit", 0)
            _call(library, "cuDeviceGet", ctypes.byref(device), ordinal)
            _call(library, "cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        except WorkerLost as error:
            raise Incompatible("the CUDA device can't be used", ordinal=ordinal, said=error) from error
        return cls(library, device, context)

    def enter(self) -> None:
        self.call("cuCtxSetCurrent", self._context)

    def uuid(self) -> bytes:
        """Names the GPU, or the part of one that this process has, the same in every process."""
        return self._uuid_of(self._device)

    def unreachable(self, uuid: bytes) -> str:
        """Why the memory of that GPU can't be copied to this one's by this process; "" = it can."""
        count, can = ctypes.c_int(), ctypes.c_int()
        self.call("cuDeviceGetCount", ctypes.byref(count))
        for ordinal in range(count.value):
            device = ctypes.c_int()
            self.call("cuDeviceGet", ctypes.byref(device), ordinal)
            if self._uuid_of(device) != uuid:
                continue
            if device.value == self._device.value:
                return ""
            self.call("cuDeviceCanAccessPeer", ctypes.byref(can), self._device, device)
            return "" if can.value else "there is no peer access between the GPUs"
        return "its GPU isn't visible here: CUDA_VISIBLE_DEVICES, or another container's"

    def _uuid_of(self, device: ctypes.c_int) -> bytes:
        uuid = ctypes.create_string_buffer(_UUID_BYTES)
        self.call("cuDeviceGetUuid_v2", uuid, device)
        return uuid.raw

    def make_stream(self) -> int:
        stream = ctypes.c_void_p()
        self.call("cuStreamCreate", ctypes.byref(stream), _NON_BLOCKING)
        return stream.value or 0

    def record(self, stream: int) -> int:
        event = ctypes.c_void_p()
        self.call("cuEventCreate", ctypes.byref(event), _NO_TIMING)
        self.call("cuEventRecord", event, ctypes.c_void_p(stream))
        self._num_events += 1
        self._events[self._num_events] = event
        return self._num_events

    def is_over(self, event: int) -> bool:
        result = self._lib.cuEventQuery(self._events[event])
        if result == _NOT_READY:
            return False
        if result != _SUCCESS:
            raise _failed(self._lib, "cuEventQuery", result)
        self.call("cuEventDestroy_v2", self._events.pop(event))
        return True

    def pin(self, num_bytes: int) -> int:
        """Where so much memory of the host begins that copies needn't wait for; it stays for the process's life."""
        address = ctypes.c_void_p()
        self.call(
            "cuMemHostAlloc", ctypes.byref(address), ctypes.c_size_t(num_bytes), ctypes.c_uint(_PORTABLE)
        )
        return address.value or 0

    def copy(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        """Begin it, between memory of any kind that CUDA knows."""
        self.call(
            "cuMemcpyAsync",
            ctypes.c_uint64(target),
            ctypes.c_uint64(source),
            ctypes.c_size_t(num_bytes),
            ctypes.c_void_p(stream),
        )

    def blank(self, num_bytes: int) -> int:
        assert num_bytes <= MAX_PIECE_BYTES
        if self._blank is None:
            address = ctypes.c_uint64()
            self.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(MAX_PIECE_BYTES))
            self._blank = address.value
        return self._blank

    def call(self, name: str, *arguments: object) -> None:
        """Any function. Raises WorkerLost with CUDA's words."""
        _call(self._lib, name, *arguments)


def _call(library: ctypes.CDLL, name: str, *arguments: object) -> None:
    result = getattr(library, name)(*arguments)
    if result != _SUCCESS:
        raise _failed(library, name, result)


def _failed(library: ctypes.CDLL, name: str, result: int) -> WorkerLost:
    words = ctypes.c_char_p()
    library.cuGetErrorString(result, ctypes.byref(words))
    return WorkerLost("CUDA failed", call=name, said=(words.value or b"").decode() or result)
