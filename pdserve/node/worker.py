"""A whole worker over its ports: role after role, until it ends. The process and the simulation run the same class."""

from __future__ import annotations

from pdserve.messages import Role
from pdserve.node.gauges import WorkerGauges
from pdserve.node.ports import WorkerPorts, WorkerSetup
from pdserve.node.run import RoleRun, RunEnd
from pdserve.service.metrics import WorkerMetrics


class Worker:
    """Event-loop thread only."""

    def __init__(self, setup: WorkerSetup, ports: WorkerPorts, metrics: WorkerMetrics, role: Role) -> None:
        self._setup = setup
        self._ports = ports
        self._gauges = WorkerGauges(metrics)
        self._role = role
        self._run: RoleRun | None = None
        self._end: RunEnd | None = None
        self._drain_asked = False

    @property
    def current(self) -> RoleRun | None:
        """The role it serves in now; None before and after."""
        return self._run

    @property
    def end(self) -> RunEnd | None:
        """How it ended."""
        return self._end

    @property
    def not_alive(self) -> list[str]:
        """Why a process of its own should take its place."""
        run = self._run
        return [run.why_unsound] if run is not None and run.why_unsound else []

    @property
    def not_ready(self) -> list[str]:
        """Why no router should count on it."""
        run = self._run
        if run is None:
            return ["not running"]
        reasons = [] if run.joined else ["no router has taken it in"]
        return [*reasons, "draining"] if run.draining else reasons

    async def run(self) -> int:
        """Serve until it is over; returns the exit code. Cancelled: everything stops at once."""
        role, generation = self._role, 0
        while True:
            self._run = RoleRun(self._setup, self._ports, self._gauges, role=role, role_generation=generation)
            if self._drain_asked:
                self._run.drain()
            try:
                end = await self._run.serve()
            finally:
                self._run = None
            if end.next_role is None or self._drain_asked:
                self._end = end
                return end.code
            role, generation = end.next_role, generation + 1

    def break_off(self, reason: str) -> None:
        """What the engine computes with is gone: end at once, with the code for it."""
        if self._run is not None:
            self._run.break_off(reason)

    def drain(self) -> None:
        """Take no new work, serve the rest, then end with exit code 0."""
        self._drain_asked = True
        if self._run is not None:
            self._run.drain()
