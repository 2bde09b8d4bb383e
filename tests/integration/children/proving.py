"""A prover with real children, and what /proc says of them."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import CollectorRegistry

from pdserve.children.children import Children
from pdserve.children.frames import Proven
from pdserve.children.prover import ChildProver
from pdserve.children.renderer import ChildRenderer
from pdserve.children.server_process import ServerProcess
from pdserve.clock import SystemClock
from pdserve.errors import PdserveError
from pdserve.structure import Structure
from tests.support.waiting import until

MEMORY_BYTES = 128 << 20
ENDLESS_S = 600.0  # a limit that no test reaches


def endless(number: int = 0) -> Structure:
    """Compiles for as long as anybody has tried; each number is another one."""
    return _patterns(20 + number)


def slow() -> Structure:
    """Refused by the library itself, after half a second of computing."""
    return _patterns(12)


def eats_memory() -> Structure:
    """Hundreds of megabytes within seconds."""
    return Structure.grammar("start: T\nT: " + " & ".join(f"/.*x{part}.*/" for part in range(60)) + "\n")


def _patterns(count: int) -> Structure:
    return Structure.json_schema(
        {"allOf": [{"type": "string", "pattern": f".*y{part}.*"} for part in range(count)]}
    )


@dataclass(frozen=True)
class Bench:
    """prover, renderer: real; server: their fork server; registry: its metrics."""

    prover: ChildProver
    renderer: ChildRenderer | None
    server: ServerProcess
    registry: CollectorRegistry

    async def outcome(self, structure: Structure, user: str = "") -> Proven | str:
        try:
            return await self.prover.prove(structure, user)
        except PdserveError as error:
            return str(error)

    def count(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(name, labels) or 0.0

    @property
    def pids(self) -> list[int]:
        return children_of(self.server.pid)

    async def warm(self, num_children: int = 3) -> list[int]:
        """All children, once they are there."""

        async def pids() -> list[int]:
            found = self.pids
            return found if len(found) == num_children and all(map(_is_at_work, found)) else []

        return await until(f"{num_children} children", pids)


@asynccontextmanager
async def bench(
    *, limit_s: float = ENDLESS_S, memory_bytes: int = MEMORY_BYTES, render_s: float | None = None
) -> AsyncIterator[Bench]:
    """render_s: None = no children for chats."""
    registry = CollectorRegistry()
    async with asyncio.TaskGroup() as tasks:
        children = Children(registry, tasks.create_task, SystemClock(), os.environ, memory_bytes=memory_bytes)
        prover = children.prover(limit_s)
        renderer = None if render_s is None else children.renderer(render_s)
        async with children:
            yield Bench(prover, renderer, children.server, registry)


def children_of(pid: int) -> list[int]:
    """Processes that this one has made and that it has not reaped."""
    if pid == 0:
        return []
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _is_at_work(pid: int) -> bool:
    """Whether it waits for jobs: its memory is limited by then."""
    limits = Path(f"/proc/{pid}/limits").read_text().splitlines()
    return next(line for line in limits if line.startswith("Max data size")).split()[3] != "unlimited"


def ticks_of(pid: int) -> int:
    """Hundredths of a second that it has computed."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def stop_all(pids: list[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)


def kill_all(pids: list[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
