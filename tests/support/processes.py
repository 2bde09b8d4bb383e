"""A whole cluster of real processes for fault and end-to-end tests: `pdserve up`, its ready file, its pids.

Waits are on events (a line on stdout, a stream's token) with generous limits, never on sleeps. Everything that is
started here is ended here, by pid.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

START_LIMIT_S = 120.0
STOP_LIMIT_S = 60.0


@dataclass(frozen=True)
class ProcessRow:
    """One line of the ready file."""

    role: str
    id: str
    pid: int
    metrics: str


class LocalCluster:
    """`pdserve up` with its children, as a context manager.

    args  further command line arguments of `pdserve up`
    """

    def __init__(self, folder: Path, *args: str, env: dict[str, str] | None = None) -> None:
        self._folder = folder
        self._ready_file = folder / "ready.json"
        self._log = folder / "up.log"
        command = [sys.executable, "-m", "pdserve.cli", "up", "--listen", "127.0.0.1:0"]
        self._command = [*command, "--ready-file", str(self._ready_file), *args]
        self._env = {**os.environ, **(env or {})}
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.Queue[str | None] = queue.Queue()

    def __enter__(self) -> Self:
        log = self._log.open("w")
        self._process = subprocess.Popen(
            self._command,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=self._env,
            start_new_session=True,
        )
        log.close()
        threading.Thread(target=self._read_lines, daemon=True).start()
        try:
            self.wait_line(lambda line: "ready" in line, START_LIMIT_S)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.stop()

    def _read_lines(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def wait_line(self, wanted: Callable[[str], bool], limit_s: float) -> str:
        """The next line of the supervisor's stdout that fits; AssertionError with the log when it ends first."""
        while True:
            try:
                line = self._lines.get(timeout=limit_s)
            except queue.Empty:
                raise AssertionError(f"no such line in {limit_s} s; log:\n{self.log_tail()}") from None
            if line is None:
                raise AssertionError(f"`pdserve up` ended; log:\n{self.log_tail()}")
            if wanted(line):
                return line

    def log_tail(self, num_chars: int = 6_000) -> str:
        """The end of what the processes wrote to stderr."""
        return self._log.read_text()[-num_chars:]

    @property
    def target(self) -> str:
        """host:port of the router."""
        return str(json.loads(self._ready_file.read_text())["router"])

    @property
    def http(self) -> str:
        """URL of the router's HTTP door."""
        return str(json.loads(self._ready_file.read_text())["http"])

    def processes(self) -> list[ProcessRow]:
        """The ready file as it is now (the supervisor rewrites it after a restart)."""
        return [ProcessRow(**row) for row in json.loads(self._ready_file.read_text())["processes"]]

    def row(self, role: str, index: int = 0) -> ProcessRow:
        """The index-th process of a role."""
        return [row for row in self.processes() if row.role == role][index]

    def signal(self, row: ProcessRow, number: signal.Signals) -> None:
        """Send a signal to one child by pid."""
        os.kill(row.pid, number)

    @contextlib.contextmanager
    def stopped(self, row: ProcessRow) -> Iterator[None]:
        """SIGSTOP a child for the block, SIGCONT behind it whatever happens."""
        os.kill(row.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(row.pid, signal.SIGCONT)

    @contextlib.contextmanager
    def nobody_restarted(self) -> Iterator[None]:
        """The supervisor stands still: what dies stays away until the end of the block."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def metric(self, row: ProcessRow, name: str, **labels: str) -> float:
        """Sum of one Prometheus metric's samples that carry these labels; 0 when there is none yet."""
        with urllib.request.urlopen(f"http://{row.metrics}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        return sum_samples(text, name, labels)

    def stop(self) -> int:
        """SIGTERM, then SIGKILL to what is left; the exit code."""
        process = self._process
        if process is None:
            return 0
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait(10)
        return process.returncode


def sum_samples(text: str, name: str, labels: dict[str, str]) -> float:
    """Sum of the samples called `name` in Prometheus text whose labels include `labels`."""
    total = 0.0
    for line in text.splitlines():
        if not line.startswith(name) or line[len(name) : len(name) + 1] not in ("{", " "):
            continue
        if all(f'{key}="{value}"' in line for key, value in labels.items()):
            total += float(line.rsplit(" ", 1)[1])
    return total


def run_cli(
    *args: str, limit_s: float = 120.0, env: dict[str, str] | None = None, prefix: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Run one `pdserve` command to its end. prefix: a command that runs it."""
    command = [*prefix, sys.executable, "-m", "pdserve.cli", *args]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=limit_s,
        env={**os.environ, **(env or {})},
        check=False,
    )
