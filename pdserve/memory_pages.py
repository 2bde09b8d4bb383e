"""Pages that are asked for ahead of their first use."""

from __future__ import annotations

import ctypes
import errno

HUGE_BYTES = 2 << 20
_MADV_POPULATE_WRITE = 23  # Linux 5.14

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def populated(address: int, num_bytes: int) -> bool:
    """Have all pages there, as a write to each would, but in one call and leaving the bytes as they are.

    returns  False where the system can't, or not here: writes will do it. (Short of memory, too, it is left to them.)
    """
    failed = _libc.madvise(address, num_bytes, _MADV_POPULATE_WRITE) != 0
    return not (failed and ctypes.get_errno() == errno.EINVAL)
