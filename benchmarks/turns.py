"""What benchmarks share that compare in turns: ratios with their spread, the machine's name, processor time."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from pathlib import Path

from deploy.command import environ_of
from pdserve.openmp import wait_briefly
from pdserve.service.config import EngineConfig

_FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "asimd", "bf16", "i8mm")


def ratio(theirs: Sequence[float], ours: Sequence[float]) -> str:
    """Median (lowest–highest) of theirs ÷ ours, round by round."""
    each = sorted(their / our for their, our in zip(theirs, ours, strict=True))
    return f"{statistics.median(each):.2f} ({each[0]:.2f}–{each[-1]:.2f})"


def spread(values: Sequence[float], digits: int = 1) -> str:
    """Median (lowest–highest)."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}–{max(values):.{digits}f})"


def machine() -> str:
    """The CPU, those of its flags that decide which kernels run, its cores, and what else it does."""
    fields: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    has = fields.get("flags", fields.get("Features", "")).split()
    flags = " ".join(flag for flag in _FLAGS if flag in has)
    name = fields.get("model name", os.uname().machine)
    return f"{name} ({flags}), {len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}"


def worker_environ() -> dict[str, str]:
    """The environment in which `pdserve up` starts workers, for an engine that is started otherwise."""
    environ = environ_of("both", EngineConfig(), os.environ)
    wait_briefly(environ)
    return environ


def cpu_s(pid: int) -> float:
    """Processor seconds of a process's living threads so far, to the microsecond."""
    used_ns = 0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        try:
            used_ns += int((thread / "schedstat").read_text().split()[0])
        except FileNotFoundError:  # it has just ended
            continue
    return used_ns / 1e9
