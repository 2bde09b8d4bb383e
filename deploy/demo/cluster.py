"""The demo's cluster: `pdserve up` as a child, from its first line to its drain."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.command import PROGRAM, environ_of
from deploy.local.child import Child
from deploy.local.plan import ProcessSpec
from pdserve.errors import WorkerLost
from pdserve.service.config import EngineConfig

_READY = "pdserve is ready"
_START_LIMIT_S = 120.0
_STOP_LIMIT_S = 20.0


@dataclass(frozen=True, slots=True)
class DemoCluster:
    """A cluster that serves. ready_line: what the supervisor says of it."""

    ready_line: str
    ready_file: Path

    @property
    def target(self) -> str:
        """host:port of the router."""
        return str(self._told()["router"])

    @property
    def http(self) -> str:
        """URL of its HTTP door; "" = it has none."""
        return str(self._told()["http"])

    def pid(self, role: str) -> int:
        """Of the first process of a role. Raises WorkerLost if there is none."""
        for row in self._told()["processes"]:
            if row["role"] == role:
                return int(row["pid"])
        raise WorkerLost("no such process in the demo's cluster", role=role)

    def kill(self, role: str) -> int:
        """kill -9 the first process of a role; its pid. Raises WorkerLost if there is none."""
        pid = self.pid(role)
        os.kill(pid, signal.SIGKILL)
        return pid

    def _told(self) -> dict[str, Any]:
        told: dict[str, Any] = json.loads(self.ready_file.read_text())
        return told


@contextlib.asynccontextmanager
async def running_cluster(folder: Path, arguments: Sequence[str]) -> AsyncIterator[DemoCluster]:
    """A cluster for the block.

    folder     for the ready file and the processes' logs
    arguments  of `pdserve up`
    Raises WorkerLost with the supervisor's own line if it doesn't come up.
    """
    ready_file = folder / "ready.json"
    command = (
        *(*PROGRAM, "up"),
        *("--listen", "127.0.0.1:0", "--ready-file", str(ready_file), "--log-dir", str(folder / "logs")),
        *arguments,
    )
    environ = environ_of("up", EngineConfig(), os.environ)
    child = await Child.start(ProcessSpec(role="up", id="up", command=command, metrics="", environ=environ))
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def take(line: str) -> None:
        if not ready.done() and line.startswith(_READY):
            ready.set_result(line)

    async with asyncio.TaskGroup() as group:
        group.create_task(child.pass_on_output(take))
        ended = group.create_task(child.wait())
        try:
            await asyncio.wait((ready, ended), timeout=_START_LIMIT_S, return_when=asyncio.FIRST_COMPLETED)
            if not ready.done():
                raise WorkerLost("the cluster did not start", said=child.last_line)
            yield DemoCluster(ready.result(), ready_file)
        finally:
            child.terminate()
            await asyncio.wait((ended,), timeout=_STOP_LIMIT_S)
            child.kill()  # what is left of it, and the supervisor's children with it
