"""What a process holds, as the kernel counts it (Linux)."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Self


@dataclass(frozen=True, slots=True)
class Footprint:
    """Open file descriptors, the sockets among them, threads, and resident memory."""

    num_files: int
    num_sockets: int
    num_threads: int
    rss_bytes: int

    @classmethod
    def of(cls, pid: int) -> Self:
        """As it is now."""
        proc = Path("/proc", str(pid))
        links = [_target(proc / "fd" / name) for name in os.listdir(proc / "fd")]
        status = dict(
            line.split(":", 1) for line in (proc / "status").read_text().splitlines() if ":" in line
        )
        return cls(
            num_files=len(links),
            num_sockets=sum(link.startswith("socket:") for link in links),
            num_threads=int(status["Threads"]),
            rss_bytes=int(status["VmRSS"].split()[0]) * 1024,
        )

    def holds_no_more_than(self, before: Footprint) -> bool:
        """Whether no handle, socket or thread has come in, and memory has grown by 5 % at most."""
        counts = (self.num_files, self.num_sockets, self.num_threads)
        limits = (before.num_files, before.num_sockets, before.num_threads)
        return all(map(int.__le__, counts, limits)) and self.rss_bytes <= 1.05 * before.rss_bytes


def _target(link: Path) -> str:
    try:
        return os.readlink(link)
    except FileNotFoundError:  # closed meanwhile
        return ""
