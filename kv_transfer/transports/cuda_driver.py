"""Streams and events of one device by CUDA's driver API: what libnccl.py needs of it, and nothing of torch."""

from __future__ import annotations

import ctypes
from typing import Self

from kv_transfer.frames import MAX_PIECE_BYTES
from pdserve.errors import Incompatible, WorkerLost

_LIBRARY = "libcuda.so.1"
_SUCCESS, _NOT_READY = 0, 600
_NON_BLOCKING = 1  # of a stream: it doesn't wait for the default one
_NO_TIMING = 2  # of an event


class CudaDriver:
    """Cuda (libnccl.py) on the primary context, which torch uses, too. Any thread that has entered."""

    def __init__(self, library: ctypes.CDLL, context: ctypes.c_void_p) -> None:
        self._lib = library
        self._context = context
        self._events: dict[int, ctypes.c_void_p] = {}
        self._num_events = 0
        self._blank: int | None = None

    @classmethod
    def open(cls, ordinal: int) -> Self:
        """The device of this number. Raises Incompatible with the driver's words."""
        try:
            library = ctypes.CDLL(_LIBRARY)
        except OSError as error:
            raise Incompatible("there is no CUDA driver", said=error) from error
        device, context = ctypes.c_int(), ctypes.c_void_p()
        try:
            _call(library, "cuInit", 0)
            _call(library, "cuDeviceGet", ctypes.byref(device), ordinal)
            _call(library, "cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        except WorkerLost as error:
            raise Incompatible("the CUDA device can't be used", ordinal=ordinal, said=error) from error
        return cls(library, context)

    def enter(self) -> None:
        self._call("cuCtxSetCurrent", self._context)

    def make_stream(self) -> int:
        stream = ctypes.c_void_p()
        self._call("cuStreamCreate", ctypes.byref(stream), _NON_BLOCKING)
        return stream.value or 0

    def record(self, stream: int) -> int:
        event = ctypes.c_void_p()
        self._call("cuEventCreate", ctypes.byref(event), _NO_TIMING)
        self._call("cuEventRecord", event, ctypes.c_void_p(stream))
        self._num_events += 1
        self._events[self._num_events] = event
        return self._num_events

    def is_over(self, event: int) -> bool:
        result = self._lib.cuEventQuery(self._events[event])
        if result == _NOT_READY:
            return False
        if result != _SUCCESS:
            raise _failed(self._lib, "cuEventQuery", result)
        self._call("cuEventDestroy_v2", self._events.pop(event))
        return True

    def blank(self, num_bytes: int) -> int:
        assert num_bytes <= MAX_PIECE_BYTES
        if self._blank is None:
            address = ctypes.c_uint64()
            self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(MAX_PIECE_BYTES))
            self._blank = address.value
        return self._blank

    def _call(self, name: str, *arguments: object) -> None:
        _call(self._lib, name, *arguments)


def _call(library: ctypes.CDLL, name: str, *arguments: object) -> None:
    result = getattr(library, name)(*arguments)
    if result != _SUCCESS:
        raise _failed(library, name, result)


def _failed(library: ctypes.CDLL, name: str, result: int) -> WorkerLost:
    words = ctypes.c_char_p()
    library.cuGetErrorString(result, ctypes.byref(words))
    return WorkerLost("CUDA failed", call=name, said=(words.value or b"").decode() or result)
