"""What a process holds, as the kernel counts it (Linux)."""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Self

_POOL = "event_engine"  # threads of gRPC's pool, which gets some more, and lets them go, as the load wants it
_HEAP_BYTES = 64 << 20
_MOST_POOL_THREADS = 4  # beyond those that were there


@dataclass(frozen=True, slots=True)
class Footprint:
    """Open file descriptors, the sockets among them, threads (gRPC's pool apart), and resident memory."""

    num_files: int
    num_sockets: int
    num_threads: int
    num_pool_threads: int
    rss_bytes: int

    @classmethod
    def of(cls, pid: int) -> Self:
        """As it is now."""
        proc = Path("/proc", str(pid))
        links = [_target(proc / "fd" / name) for name in os.listdir(proc / "fd")]
        threads = [_content(proc / "task" / name / "comm") for name in os.listdir(proc / "task")]
        num_pool_threads = sum(name.startswith(_POOL) for name in threads)
        lines = _content(proc / "status").splitlines()
        (rss_kib,) = [int(line.split()[1]) for line in lines if line.startswith("VmRSS:")]
        return cls(
            num_files=len(links),
            num_sockets=sum(link.startswith("socket:") for link in links),
            num_threads=len(threads) - num_pool_threads,
            num_pool_threads=num_pool_threads,
            rss_bytes=rss_kib * 1024,
        )

    def holds_no_more_than(self, before: Footprint) -> bool:
        """Whether no handle, socket or thread has come in, and memory has grown by 5 % at most."""
        return (
            self.num_files <= before.num_files
            and self.num_sockets <= before.num_sockets
            and self.num_threads <= before.num_threads
            and self.num_pool_threads <= before.num_pool_threads + _MOST_POOL_THREADS
            and self.rss_bytes <= 1.05 * before.rss_bytes
        )


def _target(link: Path) -> str:
    try:
        return os.readlink(link)
    except FileNotFoundError:  # closed meanwhile
        return ""


def _content(file: Path) -> str:
    try:
        return file.read_text()
    except (FileNotFoundError, ProcessLookupError):  # ended meanwhile
        return ""


def num_thread_heaps(pid: int) -> int:
    """Heaps that glibc has made for threads: each is 64 MiB of addresses at a multiple of that, used in part."""
    spans: list[tuple[int, int, str]] = []
    for line in _content(Path("/proc", str(pid), "maps")).splitlines():
        addresses, mode = line.split()[:2]
        start, end = (int(each, 16) for each in addresses.split("-"))
        spans.append((start, end, mode))
    return sum(
        used[0] % _HEAP_BYTES == 0 and used[2] == "rw-p" and rest == (used[1], used[0] + _HEAP_BYTES, "---p")
        for used, rest in itertools.pairwise(spans)
    )
