"""The C library's heap, after it has been used hard."""

from __future__ import annotations

import ctypes
import sys


def trim_heap() -> None:
    """Give freed memory back to the system: glibc keeps what lies between blocks in use.

    After a load that is a tenth of the weights and more, since decoding and packing make and free large tensors.
    Nothing happens where the C library has no such call.
    """
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
