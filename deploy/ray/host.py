"""The host of one process: starts it on this node as `pdserve up` would, and ends it when nobody could any more.

A process in the actor itself would clash with Ray over signals, the event loop and exit codes (docs/decisions/0015).
Nothing here knows Ray; actors.py makes an actor of it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from deploy.command import PROGRAM, arguments_of, environ_of
from deploy.local.child import Child
from deploy.local.plan import ProcessSpec
from deploy.local.ports import PortReservations
from deploy.local.probe import fetch, gauge, why_not_ready
from deploy.ray.node_folder import NodeFolder
from deploy.ray.spec import RayCluster, role_of
from pdserve.clock import Clock
from pdserve.service.address import join_address, split_address
from pdserve.service.config import SETTINGS, EngineConfig
from pdserve.service.private_folder import default_private_folder

_PARENT_S = 0.25
_PROBE_S = 0.2
_ROUTER_CONFIG = "config.toml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Where its process is reached.

    target     where clients, operators: where workers and operators reach it, if it is a router; else ""
    http       where clients reach it by HTTP, if they do
    """

    node: str
    metrics: str
    target: str = ""
    operators: str = ""
    http: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostReport:
    """How its process is now.

    pid       None = it isn't running
    lacks     what it says it lacks to be ready; None = it has been ready
    pairs_up  of a router: pairs that can take a request
    """

    host_pid: int
    pid: int | None
    lacks: str | None
    pairs_up: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessEnd:
    """The end of a process. ready_s: how long it had been ready; None = it never was."""

    code: int
    ready_s: float | None
    last_line: str


@dataclass(slots=True)
class _Running:
    """One incarnation."""

    child: Child
    ended: asyncio.Future[ProcessEnd]
    ready_since_s: float | None = None
    lacks: str = ""


@dataclass(slots=True)
class _Place:
    """What was prepared on the node for the process."""

    cluster: RayCluster
    process: str
    folder: NodeFolder
    addresses: Prepared
    values: Mapping[str, object] = field(default_factory=dict)


class ProcessHost:
    """Hosts one process. Event-loop thread only; that thread must live as long as the process (`Child`).

    sink      takes the lines that the process writes
    end_self  ends this whole process at once
    """

    def __init__(
        self,
        *,
        node_ip: str,
        clock: Clock,
        sink: Callable[[str], None],
        end_self: Callable[[int], object] = os._exit,
        parent_pid: Callable[[], int] = os.getppid,
    ) -> None:
        self._node_ip = node_ip
        self._clock = clock
        self._sink = sink
        self._end_self = end_self
        self._parent_pid = parent_pid
        self._stack = ExitStack()
        self._place: _Place | None = None
        self._running: _Running | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def end_with_parent(self) -> None:
        """End the process and this one once the parent is gone."""
        await until_orphaned(self._parent_pid)
        self.close()
        self._end_self(1)

    async def prepare(self, cluster: RayCluster, process: str, routers: Sequence[str]) -> Prepared:
        """Keep addresses and write the files; if that has been done, only the list of routers is written.

        Raises ConfigError if an address can't be had, OSError.
        """
        if self._place is None:
            self._place = self._prepared(cluster, process)
        self.set_routers(routers)
        return self._place.addresses

    def set_routers(self, routers: Sequence[str]) -> None:
        """Where the routers are now; an empty list changes nothing."""
        if self._place is not None and routers:
            self._place.folder.write_routers(routers)

    async def run(self) -> ProcessEnd:
        """Start the process, unless it runs, and return its end. Raises OSError if it can't be started."""
        if self._running is None:
            assert self._place is not None, "run before prepare"
            await self._start(self._place)
        assert self._running is not None
        return await asyncio.shield(self._running.ended)

    async def report(self) -> HostReport:
        """How the process is now."""
        running = self._running
        pairs_up = 0
        if running is not None and self._place is not None and self._place.addresses.target:
            answer = await fetch(self._place.addresses.metrics, "/metrics")
            pairs_up = 0 if answer is None else int(gauge(answer[1], "pdserve_pairs_up"))
        return HostReport(
            host_pid=os.getpid(),
            pid=None if running is None else running.child.pid,
            lacks="" if running is None else None if running.ready_since_s is not None else running.lacks,
            pairs_up=pairs_up,
        )

    async def drain(self, limit_s: float) -> ProcessEnd | None:
        """Let the process serve what it has and end; after limit_s it is killed. Its end, None if it didn't run."""
        running = self._running
        if running is None:
            return None
        running.child.terminate()
        try:
            async with asyncio.timeout(limit_s):
                return await asyncio.shield(running.ended)
        except TimeoutError:
            running.child.kill()
            return await asyncio.shield(running.ended)

    def close(self) -> None:
        """Kill the process and what it started, and remove the files; idempotent."""
        if self._running is not None:
            self._running.child.kill()
        if self._place is not None:
            self._place.folder.remove()
        self._stack.close()

    # --- one process

    def _prepared(self, cluster: RayCluster, process: str) -> _Place:
        role = role_of(process)
        folder = NodeFolder(default_private_folder(), f"{cluster.name}.{process}.{os.getpid()}")
        ports = self._stack.enter_context(PortReservations())

        def kept(name: str, host: str | None = None) -> str:
            """The address of a setting, on this node, with a port of its own if it names none."""
            configured = cluster.settings[name]
            own_host, port = split_address(configured) if configured else ("", 0)
            found = host or own_host
            return join_address(found, ports.reserve(found, port))

        metrics = kept("metrics.listen")
        values: dict[str, object] = {"metrics.listen": metrics}
        values |= {name: str(folder.write(name, content)) for name, content in cluster.files.items()}
        if role == "router":
            target, operators = (
                kept("router.listen", self._node_ip),
                kept("router.workers_listen", self._node_ip),
            )
            values |= {"router.id": process, "router.listen": target, "router.workers_listen": operators}
            http = kept("http.listen", self._node_ip) if cluster.settings.get("http.listen") else ""
            values |= {"http.listen": http} if http else {}
            addresses = Prepared(
                node=self._node_ip, metrics=metrics, target=target, operators=operators, http=http
            )
        else:
            _, kv_port = split_address(cluster.settings["worker.kv_listen"])
            values |= {
                "worker.id": process,
                "worker.routers": f"file://{folder.write_routers(())}",
                "worker.kv_listen": join_address(self._node_ip, kv_port),
            }
            threads = cluster.settings["engine.threads"] or int(cluster.resources[role].get("CPU", 0))
            values["engine.threads"] = threads
            addresses = Prepared(node=self._node_ip, metrics=metrics)
        return _Place(cluster, process, folder, addresses, values)

    async def _start(self, place: _Place) -> None:
        role = role_of(place.process)
        config = place.folder.write(_ROUTER_CONFIG, place.cluster.toml().encode())
        engine = EngineConfig(kind=place.cluster.settings["engine.kind"])
        spec = ProcessSpec(
            role=role,
            id=place.process,
            command=(*PROGRAM, *arguments_of(role, place.values, config)),
            metrics=place.addresses.metrics,
            environ=environ_of(role, engine, node_environ(os.environ)),
        )
        child = await Child.start(spec)
        running = self._running = _Running(child, asyncio.get_running_loop().create_future())
        task = asyncio.create_task(self._accompany(running, place))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accompany(self, running: _Running, place: _Place) -> None:
        """From its start to its end."""
        child = running.child
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(child.pass_on_output(self._sink))
                probe = group.create_task(self._await_ready(running, place.addresses.metrics))
                code = await child.wait()
                probe.cancel()
                child.kill_rest()
        finally:
            child.kill()
            self._running = None
        since_s = running.ready_since_s
        running.ended.set_result(
            ProcessEnd(
                code=code,
                ready_s=None if since_s is None else self._clock.now_s() - since_s,
                last_line=child.last_line,
            )
        )

    async def _await_ready(self, running: _Running, metrics: str) -> None:
        while (lacks := await why_not_ready(metrics)) is not None:
            running.lacks = lacks
            await asyncio.sleep(_PROBE_S)
        running.ready_since_s = self._clock.now_s()


async def until_orphaned(parent_pid: Callable[[], int] = os.getppid) -> None:
    """Return when the parent, of an actor its raylet, is gone.

    An actor outlives its raylet for minutes, and so would its process, beside the one that Ray's other nodes replace
    it by. Nothing tells an orphan on every system, so the parent's id is looked at again and again.
    """
    parent = parent_pid()
    while parent_pid() == parent:  # noqa: ASYNC110 see above
        await asyncio.sleep(_PARENT_S)


_KEYS = frozenset(key.variable for key in SETTINGS)


def node_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process on this node: of Ray's actor, without what Ray and the node would set in it.

    Settings come from the cluster's configuration only, so that they are the same on all nodes. OMP_NUM_THREADS is
    Ray's: it sets 1 for an actor with one CPU or none, whatever `engine.threads` says.
    """
    return {
        name: value
        for name, value in environ.items()
        if name not in _KEYS and name != "OMP_NUM_THREADS" and not name.startswith("RAY_")
    }
