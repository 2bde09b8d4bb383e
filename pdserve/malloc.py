"""How the C library's allocator (glibc) keeps memory. Nothing happens where it is another one."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from typing import Any

_M_ARENA_MAX = -8  # malloc.h


def trim_heap() -> None:
    """Give freed memory back to the system: glibc keeps what lies between blocks in use.

    After a load that is a tenth of the weights and more, since decoding and packing make and free large tensors.
    """
    trim = _glibc("malloc_trim")
    if trim is not None:
        trim(0)


def share_one_heap() -> None:
    """Let all threads of this process allocate from one heap; before any of them begins.

    By default each gets one of its own, up to eight a core. A message of some megabytes that passes from thread to
    thread leaves holes in several of them, which stay resident: a router that was sent many such held 300 MB where it
    holds 215 with one heap.
    """
    mallopt = _glibc("mallopt")
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)


def _glibc(name: str) -> Callable[..., Any] | None:
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
