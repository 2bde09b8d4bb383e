"""What the kernel does for a process that must not outlive its parent, nor take more than it is given."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_STATUS = Path("/proc/self/status")
_MOST_STDERR_BYTES = 1 << 16


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when the thread that made it ends. For good: it may have ended already."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(1)


def private_bytes() -> int:
    """Private writable memory of this process: what RLIMIT_DATA counts."""
    for line in _STATUS.read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) << 10
    return 0


def limit_memory(num_bytes: int) -> None:
    """Let this process take so much more than it has now.

    RLIMIT_DATA, since it counts what is written to (heap and private mappings). RLIMIT_AS would count address space
    that libraries and allocators only reserve, so any sensible number for it either fails at start or bounds nothing.
    """
    allowed = private_bytes() + num_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (allowed, allowed))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (_MOST_STDERR_BYTES, _MOST_STDERR_BYTES))


def limit_cpu(seconds: float) -> None:
    """Have the kernel end this process (SIGXCPU) once it has computed so long from now on: for a parent that hangs."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    soft = int(used.ru_utime + used.ru_stime + seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.RLIM_INFINITY))


def cpu_s() -> float:
    """What this process has computed so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
