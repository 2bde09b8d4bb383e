"""The keeper: as many hosts as the cluster is to have, each with its process, whatever ends; and their drain.

Its state is what the store says and which hosts there are, so a keeper that was killed goes on where it was. Nothing
here knows Ray; actors.py makes an actor of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import structlog

from deploy.local.restarts import Again, GiveUp, RestartPolicy, Restarts, exit_text
from deploy.local.screen import ERROR_PREFIX
from deploy.ray.host import HostReport, Prepared, ProcessEnd
from deploy.ray.ports import Host, HostLost, Hosts, Store
from deploy.ray.spec import SECRET, RayCluster, role_of
from pdserve.clock import Clock
from pdserve.ids import Random
from pdserve.service.lifecycle import EXIT_USAGE
from pdserve.service.secret import MIN_SECRET_BYTES
from pdserve.service.settings import ConfigError

# A superseded process is started again: nobody else starts processes with its id, so the other one is about to end.
POLICY = RestartPolicy(final_exits={}, final_starts={EXIT_USAGE: "it can't start with these settings"})
_REPORT_S = 1.0
# A host does nothing else than answer: one that is silent for so long is stopped, or its node is.
_SILENT_S = 5.0

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessState:
    """One process, for people and for `up`, which waits.

    state  placing (Ray looks for a node), starting, ready, restarting, draining, failed
    why    what it waits for, or how it ended
    """

    id: str
    role: str
    state: str
    why: str = ""
    node: str = ""
    metrics: str = ""
    pid: int | None = None
    host_pid: int | None = None
    num_restarts: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptState:
    """The whole cluster.

    targets    where clients reach it; operators: where workers and operators do; http: where clients do by HTTP
    ranges     role → the fewest and the most of it; scaling: what was last decided between them, and why
    is_served  a router has a pair that can take a request, or a worker alone can
    """

    name: str
    counts: Mapping[str, int]
    ranges: Mapping[str, tuple[int, int]]
    scaling: str
    targets: tuple[str, ...]
    operators: tuple[str, ...]
    http: tuple[str, ...]
    is_served: bool
    is_ending: bool
    processes: tuple[ProcessState, ...]


@dataclass(slots=True)
class _Slot:
    """One process and its present host."""

    process: str
    restarts: Restarts
    state: str = "placing"
    why: str = ""
    host: Host | None = None
    addresses: Prepared | None = None
    report: HostReport | None = None
    ready_since_s: float | None = None
    num_restarts: int = 0
    let_go: asyncio.Event = field(default_factory=asyncio.Event)
    again: asyncio.Event = field(default_factory=asyncio.Event)


class Keeper:
    """Keeps one cluster. Event-loop thread only; one `run`."""

    def __init__(self, store: Store, hosts: Hosts, clock: Clock, random: Random) -> None:
        self._store = store
        self._hosts = hosts
        self._clock = clock
        self._random = random
        self._cluster: RayCluster | None = None
        self._slots: dict[str, _Slot] = {}
        self._changed = asyncio.Event()
        self._lock = asyncio.Lock()
        self._loaded = asyncio.Event()
        self._router_known = asyncio.Event()
        self._to_adopt: set[str] = set()
        self._adopted = asyncio.Event()
        self._is_scaled = asyncio.Event()
        self.scaling = ""

    # --- what is asked of it; each may be asked again

    async def up(self, wanted: RayCluster) -> list[str]:
        """Keep this cluster, or this many of the one that there is, and try again what has failed.

        Returns how the one that there is differs otherwise: then nothing is changed.
        """
        async with self._lock:
            await self._loaded.wait()
            if self._cluster is None:
                secret = (
                    f"{self._random.getrandbits(8 * MIN_SECRET_BYTES):0{2 * MIN_SECRET_BYTES}x}\n".encode()
                )
                await self._keep(replace(wanted, files={SECRET: secret, **wanted.files}))
                return []
            if self._cluster.is_ending:
                return ["it is being taken down"]
            if differences := self._cluster.differences(wanted):
                return differences
            await self._keep(self._cluster.asked(wanted.ranges))
            return []

    async def scale(self, ranges: Mapping[str, tuple[int, int]]) -> None:
        """Other numbers of these roles. Raises ConfigError for what can't be."""
        async with self._lock:
            await self._loaded.wait()
            if self._cluster is None or self._cluster.is_ending:
                raise ConfigError("there is no such cluster")
            await self._keep(self._cluster.asked(ranges))

    async def follow_load(self, counts: Mapping[str, int], victims: Mapping[str, Sequence[str]]) -> None:
        """Of what scaling decides; see `RayCluster.scaled`. Nothing, if it isn't to scale any more."""
        async with self._lock:
            if self._cluster is not None and self._cluster.is_scaled:
                await self._keep(self._cluster.scaled(counts, victims))

    async def down(self) -> None:
        """Drain and end everything: routers first, since their streams need the workers. `run` returns then."""
        async with self._lock:
            await self._loaded.wait()
            if self._cluster is not None and not self._cluster.is_ending:
                await self._keep(replace(self._cluster, is_ending=True))

    async def state(self) -> KeptState | None:
        """How everything is; None if there is nothing to keep. A keeper that has come back looks at its hosts first."""
        await self._loaded.wait()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_SILENT_S):
                await self._adopted.wait()
        cluster = self._cluster
        if cluster is None:
            return None
        routers = [slot.addresses for slot in self._of_role("router") if slot.addresses is not None]
        pairs_up = sum(slot.report.pairs_up for slot in self._of_role("router") if slot.report is not None)
        return KeptState(
            name=cluster.name,
            counts=cluster.counts,
            ranges=cluster.ranges,
            scaling=self.scaling if cluster.is_scaled else "",
            targets=tuple(address.target for address in routers),
            operators=tuple(address.operators for address in routers),
            http=tuple(address.http for address in routers if address.http),
            is_served=pairs_up > 0 or cluster.serves_alone,
            is_ending=cluster.is_ending,
            processes=tuple(_shown(slot) for slot in self._slots.values()),
        )

    async def until_scaled(self) -> RayCluster:
        """The cluster, once it is one whose numbers follow the load."""
        await self._is_scaled.wait()
        assert self._cluster is not None
        return self._cluster

    def is_scaled_otherwise(self, cluster: RayCluster) -> bool:
        """Whether it is to be scaled no longer, or within other ranges."""
        now = self._cluster
        return now is None or not now.is_scaled or now.ranges != cluster.ranges

    @property
    def cluster(self) -> RayCluster | None:
        """What it keeps."""
        return self._cluster

    def unplaced(self) -> dict[str, dict[str, float]]:
        """What the processes take for which Ray has found no node; see `RayCluster.needs`."""
        if self._cluster is None:
            return {}
        return self._cluster.needs([each.process for each in self._slots.values() if each.state == "placing"])

    # --- keeping

    async def run(self) -> None:
        """Keep what the store says until it is taken down."""
        self._take(await self._store.load())
        async with asyncio.TaskGroup() as group:
            self._to_adopt = await self._hosts.names()
            self._adopt("")
            for process in sorted(self._to_adopt):
                # Also hosts that are no longer wanted: their drain goes on.
                self._add(process, group)
            self._loaded.set()
            self._changed.set()
            while True:
                await self._changed.wait()
                self._changed.clear()
                if self._cluster is None:
                    continue
                wanted = self._cluster.processes()
                self._let_go(set(self._slots) - set(wanted))
                await self._hosts.reserve(self._cluster, {*wanted, *self._slots})
                for process in wanted:
                    if process not in self._slots:
                        self._add(process, group)
                if self._cluster.is_ending and not self._slots:
                    break
        await self._store.delete()
        await self._hosts.reserve(None, ())
        log.info("ray.cluster_ended", cluster=self._cluster.name)

    async def _keep(self, cluster: RayCluster) -> None:
        await self._store.save(cluster)
        self._take(cluster)
        for slot in self._slots.values():
            slot.again.set()
        self._changed.set()

    def _take(self, cluster: RayCluster | None) -> None:
        self._cluster = cluster
        if cluster is not None and cluster.is_scaled:
            self._is_scaled.set()
        else:
            self._is_scaled.clear()

    def _add(self, process: str, group: asyncio.TaskGroup) -> None:
        slot = self._slots[process] = _Slot(process, Restarts(POLICY))
        group.create_task(self._keep_slot(slot))

    def _adopt(self, process: str) -> None:
        """Of one that was found: it has answered, or never will."""
        self._to_adopt.discard(process)
        if not self._to_adopt:
            self._adopted.set()

    def _let_go(self, processes: set[str]) -> None:
        """Tell these to drain; workers of a cluster that ends do so after the routers."""
        assert self._cluster is not None
        routers = {process for process in processes if role_of(process) == "router"}
        waits_for_routers = self._cluster.is_ending and bool(routers)
        for process in routers if waits_for_routers else processes:
            self._slots[process].let_go.set()

    async def _keep_slot(self, slot: _Slot) -> None:
        """A host and its process, again and again, until it is let go."""
        try:
            work = asyncio.create_task(self._serve(slot))
            let_go = asyncio.create_task(slot.let_go.wait())
            try:
                await asyncio.wait({work, let_go}, return_when=asyncio.FIRST_COMPLETED)
                if not work.done():
                    await self._drain(slot)
            finally:
                for task in (work, let_go):
                    task.cancel()
                done = await asyncio.gather(work, let_go, return_exceptions=True)
            for result in done:
                if isinstance(result, Exception):
                    raise result
            await self._hosts.end(slot.process)
        finally:
            del self._slots[slot.process]
            self._adopt(slot.process)
            self._changed.set()

    async def _drain(self, slot: _Slot) -> None:
        assert self._cluster is not None
        has_no_place = slot.host is not None and slot.addresses is None
        slot.state, slot.why = "draining", ""
        limit_s = self._cluster.drain_s
        log.info("ray.draining", process=slot.process, limit_s=limit_s)
        try:
            host = slot.host or await self._hosts.find(slot.process)
            if host is None or has_no_place:
                return
            async with asyncio.timeout(_SILENT_S):
                await host.report()
            async with asyncio.timeout(limit_s + _SILENT_S):
                await host.drain(limit_s)
        except (HostLost, TimeoutError) as error:
            log.warning("ray.not_drained", process=slot.process, error=str(error))

    async def _serve(self, slot: _Slot) -> None:
        """Host after host, process after process, with the pauses of `Restarts`; returns never."""
        while True:
            slot.state, slot.why, slot.ready_since_s = "placing", "", None
            try:
                end = await self._serve_once(slot)
                told = exit_text(end.code)
            except HostLost as error:
                end = self._end_of_lost(slot, error)
                told = f"lost its host: {error}"
                slot.host = slot.addresses = None
                self._adopt(slot.process)
                self._tell_routers()
                await self._hosts.end(slot.process)
            slot.report = None
            said = end.last_line.removeprefix(ERROR_PREFIX)
            match slot.restarts.after_exit(end.code, end.ready_s):
                case Again(delay_s, num_in_a_row):
                    slot.state, slot.why = "restarting", told
                    slot.num_restarts += 1
                    log.warning(
                        "ray.restarting",
                        process=slot.process,
                        why=told,
                        in_a_row=num_in_a_row,
                        delay_s=delay_s,
                    )
                    await asyncio.sleep(delay_s)
                case GiveUp(reason):
                    slot.state = "failed"
                    slot.why = f"{told}: {reason}" + (f"; it said: {said}" if said else "")
                    log.error("ray.gave_up", process=slot.process, why=slot.why)
                    slot.again.clear()
                    await slot.again.wait()
                    slot.restarts = Restarts(POLICY)

    def _end_of_lost(self, slot: _Slot, error: HostLost) -> ProcessEnd:
        since_s = slot.ready_since_s
        return ProcessEnd(
            code=-signal.SIGKILL,
            ready_s=None if since_s is None else self._clock.now_s() - since_s,
            last_line=str(error),
        )

    async def _serve_once(self, slot: _Slot) -> ProcessEnd:
        """One host, or one more process on it, to the end of either. Raises HostLost."""
        assert self._cluster is not None
        is_router = role_of(slot.process) == "router"
        if not is_router:
            slot.why = "a router must have a place first"
            await self._router_known.wait()
            slot.why = ""
        slot.host = host = await self._hosts.find_or_create(slot.process, self._cluster)
        slot.addresses = await host.prepare(self._cluster, slot.process, self.operators())
        self._adopt(slot.process)
        slot.state = "starting"
        if is_router:
            self._tell_routers()
        lost: list[HostLost] = []
        end: ProcessEnd | None = None
        try:
            async with asyncio.TaskGroup() as group:
                reports = group.create_task(self._watch(slot, host))
                end = await host.run()
                reports.cancel()
        except* HostLost as errors:
            lost = [error for error in errors.exceptions if isinstance(error, HostLost)]
        if end is None:
            raise lost[0]
        return end

    async def _watch(self, slot: _Slot, host: Host) -> None:
        """Ask the host how it is, and give it the routers. Raises HostLost, also for one that doesn't answer."""
        told: tuple[str, ...] = ()
        while True:
            try:
                async with asyncio.timeout(_SILENT_S):
                    slot.report = await host.report()
                    routers = self.operators()
                    if routers != told and role_of(slot.process) != "router":
                        await host.set_routers(routers)
                        told = routers
            except TimeoutError:
                raise HostLost(f"it has not answered for {_SILENT_S:g} s") from None
            slot.why = slot.report.lacks or ""
            if slot.report.lacks is None and slot.ready_since_s is None:
                slot.state, slot.ready_since_s = "ready", self._clock.now_s()
                log.info("ray.ready", process=slot.process, pid=slot.report.pid)
            await asyncio.sleep(_REPORT_S)

    # --- routers

    def _of_role(self, role: str) -> list[_Slot]:
        return [slot for slot in self._slots.values() if role_of(slot.process) == role]

    def operators(self) -> tuple[str, ...]:
        """Where workers reach the routers that have a place, those that drain left out."""
        return tuple(
            slot.addresses.operators
            for slot in self._of_role("router")
            if slot.addresses is not None and not slot.let_go.is_set()
        )

    def _tell_routers(self) -> None:
        if self.operators():
            self._router_known.set()


def _shown(slot: _Slot) -> ProcessState:
    report, addresses = slot.report, slot.addresses
    return ProcessState(
        id=slot.process,
        role=role_of(slot.process),
        state=slot.state,
        why=slot.why,
        node="" if addresses is None else addresses.node,
        metrics="" if addresses is None else addresses.metrics,
        pid=None if report is None else report.pid,
        host_pid=None if report is None else report.host_pid,
        num_restarts=slot.num_restarts,
    )
