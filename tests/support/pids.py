"""Waiting for the end of processes that aren't this one's children."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path


async def wait_gone(pid: int, limit_s: float = 30.0) -> None:
    """Return when no process of this pid runs any more. Raises TimeoutError."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(descriptor, ended.set)
    try:
        async with asyncio.timeout(limit_s):
            await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


def exit_code_of_zombie(pid: int) -> int:
    """Of one that has ended and whose parent, which is stopped, has not yet asked; negative = the signal."""
    state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    assert state == "Z", f"{pid} is in state {state}"
    return os.waitstatus_to_exitcode(int(fields[48]))
