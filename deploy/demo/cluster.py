"""The demo's cluster: `pdserve up` as a child, from its first line to its drain."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from deploy.command import PROGRAM, environ_of
from deploy.local.child import Child
from deploy.local.plan import ProcessSpec
from pdserve.errors import WorkerLost
from pdserve.service.config import EngineConfig

_READY = "pdserve is ready"
_START_LIMIT_S = 120.0
_STOP_LIMIT_S = 20.0


class DemoCluster:
    """Made by `running`; event-loop thread only."""

    def __init__(self, child: Child, ready_file: Path) -> None:
        self._child = child
        self._ready_file = ready_file
        self.ready_line = ""

    @classmethod
    @contextlib.asynccontextmanager
    async def running(cls, folder: Path, arguments: Sequence[str]) -> AsyncIterator[DemoCluster]:
        """A cluster that serves, for the block.

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
        child = await Child.start(
            ProcessSpec(role="up", id="up", command=command, metrics="", environ=environ)
        )
        cluster = cls(child, ready_file)
        ready = asyncio.Event()

        def take(line: str) -> None:
            if line.startswith(_READY):
                cluster.ready_line = line
                ready.set()

        async with asyncio.TaskGroup() as group:
            group.create_task(child.pass_on_output(take))
            ended = group.create_task(child.wait())
            ended.add_done_callback(lambda _: ready.set())
            try:
                async with asyncio.timeout(_START_LIMIT_S):
                    await ready.wait()
                if not cluster.ready_line:
                    raise WorkerLost("the cluster did not start", said=child.last_line)
                yield cluster
            finally:
                await _end(child, ended)

    @property
    def target(self) -> str:
        """host:port of the router."""
        return str(json.loads(self._ready_file.read_text())["router"])

    def pid(self, role: str) -> int:
        """The first process of a role. Raises WorkerLost if there is none."""
        for row in json.loads(self._ready_file.read_text())["processes"]:
            if row["role"] == role:
                return int(row["pid"])
        raise WorkerLost("no such process in the demo's cluster", role=role)

    def kill(self, role: str) -> int:
        """kill -9 the first process of a role; its pid."""
        pid = self.pid(role)
        os.kill(pid, signal.SIGKILL)
        return pid


async def _end(child: Child, ended: asyncio.Task[int]) -> None:
    child.terminate()
    try:
        async with asyncio.timeout(_STOP_LIMIT_S):
            await asyncio.shield(ended)
    except TimeoutError:
        child.kill()  # the supervisor's children go with it
