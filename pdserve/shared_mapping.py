"""A memfd's memory in this process, placed so that the kernel can map it by huge pages.

Small pages cost a copy of 256 KiB a third of its speed. Most kernels give shared memory huge pages only where they are
asked to collapse small ones into them (MADV_COLLAPSE, Linux 6.1), which needs a mapping at a multiple of their size:
nothing that Python's mmap can ask for.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import weakref

from pdserve.memory_pages import HUGE_BYTES

_MADV_COLLAPSE = 25
_MAP_FIXED = 0x10
_PROT_NONE = 0
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class SharedMapping:
    """The first num_bytes of a descriptor, which needn't stay open. Raises OSError.

    address  where they lie, a multiple of HUGE_BYTES
    """

    def __init__(self, descriptor: int, num_bytes: int, *, writable: bool) -> None:
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        reserved_bytes = num_bytes + HUGE_BYTES
        reserved = _map(None, reserved_bytes, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
        self.address = -(-reserved // HUGE_BYTES) * HUGE_BYTES
        self._collapsed_bytes = 0
        self._num_bytes = num_bytes
        self._array = (ctypes.c_ubyte * num_bytes).from_address(self.address)
        self._unmap = weakref.finalize(self._array, _libc.munmap, reserved, reserved_bytes)
        self._unmap.atexit = False  # other threads may be copying still
        try:
            _map(self.address, num_bytes, protection, mmap.MAP_SHARED | _MAP_FIXED, descriptor)
        except OSError:
            self._unmap()
            raise

    def view(self) -> memoryview:
        """All of it; it is mapped as long as a view lives. Only of a writable mapping."""
        return memoryview(self._array).cast("B")

    def collapse(self, end: int) -> int:
        """Put what lies in front of `end` on huge pages, as far as the system has them; each at most once.

        Any thread. Takes a fraction of a millisecond a page, and a page's memory is taken whole.

        returns  how far that is done now, `end` at least
        """
        while self._collapsed_bytes < end:
            start = self._collapsed_bytes
            self._collapsed_bytes += HUGE_BYTES  # first: two threads must not wait for the same page
            if self._collapsed_bytes > self._num_bytes:
                break
            self._array[start]  # a page with nothing in it can't be collapsed
            failed = _libc.madvise(self.address + start, HUGE_BYTES, _MADV_COLLAPSE) != 0
            if failed and ctypes.get_errno() == errno.EINVAL:  # not on this system
                self._collapsed_bytes = max(end, self._num_bytes)
        return self._collapsed_bytes

    def close(self) -> None:
        """Unmap it, whoever still looks at it. Idempotent."""
        self._unmap()


def _map(address: int | None, num_bytes: int, protection: int, flags: int, descriptor: int) -> int:
    found: int = _libc.mmap(address, num_bytes, protection, flags, descriptor, 0)
    if found == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return found
