"""One child process: started in a group of its own, never outliving its supervisor, its output passed on by lines."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
from collections import deque
from collections.abc import Callable

from deploy.local.plan import ProcessSpec

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
_LAST_LINES = 40


class Child:
    """Event-loop thread only; made by `start`."""

    def __init__(self, spec: ProcessSpec, process: asyncio.subprocess.Process) -> None:
        self.spec = spec
        self._process = process
        self._last_lines: deque[str] = deque(maxlen=_LAST_LINES)

    @classmethod
    async def start(cls, spec: ProcessSpec) -> Child:
        """Start it. Raises OSError when the program can't be started."""
        parent = os.getpid()
        process = await asyncio.create_subprocess_exec(
            *spec.command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=spec.environ,
            preexec_fn=lambda: _set_apart(parent),
        )
        if spec.cores and hasattr(os, "sched_setaffinity"):
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(process.pid, spec.cores)
        return cls(spec, process)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def last_line(self) -> str:
        """The last line that wasn't empty: of a process that failed to start, its error."""
        return next((line for line in reversed(self._last_lines) if line.strip()), "")

    async def pass_on_output(self, sink: Callable[[str], None]) -> None:
        """Give each line to `sink`, until the child has closed its output."""
        assert self._process.stdout is not None
        rest = b""
        while chunk := await self._process.stdout.read(1 << 16):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                self._take(line, sink)
        if rest:
            self._take(rest, sink)

    def _take(self, raw: bytes, sink: Callable[[str], None]) -> None:
        line = raw.decode(errors="replace").rstrip("\r")
        self._last_lines.append(line)
        sink(line)

    async def wait(self) -> int:
        """Its exit status; negative = the signal that killed it."""
        return await self._process.wait()

    def terminate(self) -> None:
        """Ask it to drain and end; no error if it has ended."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it and what it started, now; no error if it has ended."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def kill_rest(self) -> None:
        """After its end: what it started and left behind goes too."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)


def _set_apart(parent: int) -> None:
    """Runs in the child before the program: a process group of its own, and the kernel kills it when the supervisor's
    thread has ended.

    The group keeps Ctrl-C in the terminal from it: the supervisor alone hears that, and drains. It is set here since
    uvloop's loops don't know the argument `process_group`. SIGKILL, since a stopped or hung child would not hear
    anything milder; what it served is lost with the router.
    """
    os.setpgid(0, 0)
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died before the call
            os._exit(1)
