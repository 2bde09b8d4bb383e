"""Routers and workers started one by one with `pdserve router|prefill|decode|worker`, as an operator does it.

Addresses are known before the first process runs and stay the same over restarts, so any order of starting works.
Every process that is started here is ended here, by pid.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from deploy.local.ports import PortReservations
from deploy.local.probe import fetch, is_ready
from tests.support.processes import sum_samples
from tests.support.waiting import until

STOP_LIMIT_S = 60.0


@dataclass(slots=True)
class Single:
    """One process and its later incarnations, which have the same id and addresses.

    address, operators  where clients, and where workers and operators, reach it, if it is a router or a gateway
    metrics             its HTTP server
    """

    role: str
    id: str
    command: tuple[str, ...]
    metrics: str
    log: Path
    address: str = ""
    operators: str = ""
    environ: Mapping[str, str] = field(default_factory=dict)
    _process: subprocess.Popen[bytes] | None = None

    def start(self) -> Self:
        """Start it; returns at once."""
        assert self._process is None or self._process.returncode is not None, f"{self.id} runs already"
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                env={**os.environ, **self.environ},
                start_new_session=True,
            )
        return self

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def runs(self) -> bool:
        """Whether it has been started and hasn't ended."""
        return self._process is not None and self._process.poll() is None

    def send(self, number: signal.Signals) -> None:
        """A signal, by pid; no error if it has ended."""
        if self.runs:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL, and wait for its end."""
        self.send(signal.SIGKILL)
        self.wait(STOP_LIMIT_S)

    def terminate(self) -> int:
        """SIGTERM, and wait for the end of its drain; the exit code."""
        self.send(signal.SIGTERM)
        return self.wait(STOP_LIMIT_S)

    def wait(self, limit_s: float = STOP_LIMIT_S) -> int:
        """Its exit code, once it has ended; negative = the signal that killed it."""
        assert self._process is not None
        return self._process.wait(limit_s)

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """SIGSTOP for the block, SIGCONT behind it whatever happens."""
        self.send(signal.SIGSTOP)
        try:
            yield
        finally:
            self.send(signal.SIGCONT)

    async def metric(self, name: str, **labels: str) -> float:
        """Sum of one metric's samples that carry these labels; 0 when there is none, or nobody answers."""
        answer = await fetch(self.metrics, "/metrics")
        return 0.0 if answer is None else sum_samples(answer[1], name, labels)

    async def ready(self) -> None:
        """Return when it says that it is ready."""
        await until(f"{self.id} is ready", lambda: is_ready(self.metrics), told=self.log_tail)

    def log_tail(self, num_chars: int = 3_000) -> str:
        """The end of what it has written."""
        return f"{self.id}: {self.log.read_text(errors='replace')[-num_chars:]}" if self.log.exists() else ""


class Singles:
    """Makes the processes of one cluster; a context manager that kills what is left.

    flags  given to every process
    """

    def __init__(self, folder: Path, *flags: str) -> None:
        self._folder = folder
        self._flags = flags
        self._ports = PortReservations()
        self._twins: list[Single] = []
        self.all: dict[str, Single] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        for single in (*self.all.values(), *self._twins):
            single.send(signal.SIGKILL)
        for single in (*self.all.values(), *self._twins):
            if single.runs:
                single.wait()
        self._ports.close()

    def router(self, name: str, *flags: str) -> Single:
        """A router, not yet started."""
        address, operators = self.reserve(), self.reserve()
        listen = ("--listen", address, "--workers-listen", operators)
        single = self._make("router", name, *listen, "--id", name, *flags)
        single.address, single.operators = address, operators
        return single

    def reserve(self) -> str:
        """An address of this machine that nobody else gets."""
        return f"127.0.0.1:{self._ports.reserve('127.0.0.1', 0)}"

    def gateway(self, name: str, *flags: str) -> Single:
        """A gateway in front of all routers that were made before it, not yet started."""
        address = self.reserve()
        routers = ",".join(router.address for router in self.routers)
        single = self._make("gateway", name, "--target", routers, "--listen", address, *flags)
        single.address = address
        return single

    def worker(
        self,
        role: str,
        name: str,
        *flags: str,
        routers: tuple[Single, ...] = (),
        routers_file: Path | None = None,
    ) -> Single:
        """A worker, not yet started, that will dial these routers, or those in a file.

        Without either: all that were made before it.
        """
        addresses = ",".join(router.operators for router in routers or self.routers)
        dialled = addresses if routers_file is None else routers_file.as_uri()
        command = "worker" if role == "both" else role
        return self._make(role, name, "--id", name, "--routers", dialled, *flags, command=command)

    def spoiled_decode(self, what: str, name: str, *flags: str) -> Single:
        """A decode worker that breaks in mid-stream (spoiled_worker.py), not yet started."""
        single = self.worker("decode", name, *flags)
        at = single.command.index("decode")
        single.command = (
            sys.executable,
            "-m",
            "tests.support.spoiled_worker",
            what,
            *single.command[at + 1 :],
        )
        return single

    def twin(self, single: Single) -> Single:
        """Another process with the id of a worker, not yet started; killed at the end as all are."""
        metrics = self.reserve()
        command = tuple(metrics if word == single.metrics else word for word in single.command)
        twin = dataclasses.replace(
            single, command=command, metrics=metrics, log=single.log.with_suffix(".twin.log"), _process=None
        )
        self._twins.append(twin)
        return twin

    @property
    def routers(self) -> tuple[Single, ...]:
        """All routers."""
        return tuple(single for single in self.all.values() if single.role == "router")

    @property
    def workers(self) -> tuple[Single, ...]:
        """All workers."""
        return tuple(single for single in self.all.values() if single.role not in ("router", "gateway"))

    def _make(self, role: str, name: str, *flags: str, command: str = "") -> Single:
        metrics = self.reserve()
        words = (sys.executable, "-m", "pdserve.cli", command or role, *self._flags, *flags)
        single = Single(
            role=role,
            id=name,
            command=(*words, "--metrics.listen", metrics, "--log.format", "json"),
            metrics=metrics,
            log=self._folder / f"{name}.log",
        )
        assert name not in self.all, name
        self.all[name] = single
        return single

    def start(self) -> Self:
        """Start all that don't run."""
        for single in self.all.values():
            if not single.runs:
                single.start()
        return self

    def log_tails(self) -> str:
        """The ends of all logs, for a failing test."""
        return "\n".join(single.log_tail() for single in self.all.values())
