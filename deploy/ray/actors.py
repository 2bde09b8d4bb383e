"""The actors, and the ports of ports.py by Ray."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

import ray
from ray.exceptions import RayError, RayTaskError
from ray.experimental import internal_kv

from deploy.local.output import PrefixedOutput
from deploy.ray.host import HostReport, Prepared, ProcessEnd, ProcessHost, until_orphaned
from deploy.ray.keeper import Keeper, KeptState
from deploy.ray.placement import Places
from deploy.ray.ports import Host, HostLost
from deploy.ray.scaling import follow_load
from deploy.ray.spec import KEEPER, NAMESPACE, RayCluster, decode, encode
from pdserve.clock import SystemClock
from pdserve.ids import system_random
from pdserve.service.private_folder import default_private_folder

T = TypeVar("T")

_PREFIX = b"pdserve/"
_NAME_PAUSE_S = 0.2
# A name may stay taken for seconds after its actor's end; what comes next then fails, and is tried again.
_NAME_TRIES = 50


def actor_name(cluster: str, process: str) -> str:
    """In the namespace `pdserve`."""
    return f"{cluster}/{process}"


class HostActor:
    """`ProcessHost` as an actor. Async, so that its one loop thread, which starts the process, lives as long as it."""

    def __init__(self, name: str) -> None:
        output = PrefixedOutput(sys.stdout, 0)
        self._host = ProcessHost(
            node_ip=ray.util.get_node_ip_address(),
            clock=SystemClock(),
            sink=lambda text: output.line(name, text),
        )
        self._watch = asyncio.get_running_loop().create_task(self._host.end_with_parent())

    async def prepare(self, cluster: RayCluster, process: str, routers: Sequence[str]) -> Prepared:
        return await self._host.prepare(cluster, process, routers)

    async def run(self) -> ProcessEnd:
        return await self._host.run()

    async def report(self) -> HostReport:
        return await self._host.report()

    async def set_routers(self, routers: Sequence[str]) -> None:
        self._host.set_routers(routers)

    async def drain(self, limit_s: float) -> ProcessEnd | None:
        return await self._host.drain(limit_s)

    async def close(self) -> None:
        """Before it is killed, so that no files stay behind."""
        self._host.close()


class KeeperActor:
    """`Keeper` as an actor that Ray starts again wherever it dies. Its end is that of the cluster."""

    def __init__(self, cluster: str) -> None:
        self._name = cluster
        self._keeper = Keeper(KvStore(cluster), RayHosts(cluster), SystemClock(), system_random())
        self._tasks = [asyncio.get_running_loop().create_task(each) for each in (self._run(), self._watch())]

    async def _run(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                name = f"{self._name}.{KEEPER}.{os.getpid()}"
                scaling = group.create_task(
                    follow_load(self._keeper, SystemClock(), default_private_folder(), name)
                )
                await self._keeper.run()
                scaling.cancel()
        except Exception as error:  # the outermost frame of the actor: Ray starts it again, and it goes on
            sys.stderr.write(f"{self._name}/{KEEPER}: {error!r}\n")
            sys.stderr.flush()
            os._exit(1)
        me = ray.get_actor(actor_name(self._name, KEEPER), NAMESPACE)
        await asyncio.to_thread(ray.kill, me)

    async def _watch(self) -> None:
        await until_orphaned()  # as hosts do: another keeper is about to be started
        os._exit(1)

    async def up(self, cluster: RayCluster) -> list[str]:
        return await self._keeper.up(cluster)

    async def scale(self, ranges: Mapping[str, tuple[int, int]]) -> None:
        await self._keeper.scale(ranges)

    async def down(self) -> None:
        await self._keeper.down()

    async def state(self) -> KeptState | None:
        return await self._keeper.state()

    async def unplaced(self) -> dict[str, dict[str, float]]:
        """What the processes take for which Ray has found no node."""
        return self._keeper.unplaced()


class KvStore:
    """The description of a cluster in the key-value store of Ray's head; see `Store`."""

    def __init__(self, cluster: str) -> None:
        self._key = _PREFIX + cluster.encode()

    async def load(self) -> RayCluster | None:
        raw = await asyncio.to_thread(internal_kv._internal_kv_get, self._key, namespace=NAMESPACE.encode())
        return None if raw is None else decode(raw)

    async def save(self, cluster: RayCluster) -> None:
        await asyncio.to_thread(
            internal_kv._internal_kv_put, self._key, encode(cluster), True, namespace=NAMESPACE.encode()
        )

    async def delete(self) -> None:
        await asyncio.to_thread(internal_kv._internal_kv_del, self._key, namespace=NAMESPACE.encode())


def kept_clusters() -> list[RayCluster]:
    """All that are kept on this Ray cluster; blocks."""
    keys = internal_kv._internal_kv_list(_PREFIX, namespace=NAMESPACE.encode())
    found = (internal_kv._internal_kv_get(key, namespace=NAMESPACE.encode()) for key in keys)
    return [decode(raw) for raw in found if raw is not None]


class RayHosts:
    """See `Hosts`. Calls that block go to a thread."""

    def __init__(self, cluster: str) -> None:
        self._name = cluster
        self._places = Places(cluster, lambda process: find_actor(cluster, process) is not None)

    async def names(self) -> set[str]:
        return {process for process in await asyncio.to_thread(living, self._name) if process != KEEPER}

    async def find(self, process: str) -> Host | None:
        handle = await asyncio.to_thread(find_actor, self._name, process)
        return None if handle is None else RemoteHost(handle)

    async def find_or_create(self, process: str, cluster: RayCluster) -> Host:
        if (found := await self.find(process)) is not None:
            return found
        try:
            handle = await asyncio.to_thread(self._create, process, cluster)
        except (RayError, ValueError) as error:  # the latter: the name isn't free yet
            raise HostLost(_first_line(error)) from error
        return RemoteHost(handle)

    def _create(self, process: str, cluster: RayCluster) -> Any:
        resources = dict(cluster.resources[process.rpartition("-")[0]])
        return (
            ray.remote(HostActor)
            .options(
                name=actor_name(self._name, process),
                namespace=NAMESPACE,
                lifetime="detached",
                max_restarts=0,
                num_cpus=resources.pop("CPU", 0),
                num_gpus=resources.pop("GPU", 0),
                resources=resources,
                scheduling_strategy=self._places.strategy(process, cluster),
            )
            .remote(actor_name(self._name, process))
        )

    async def end(self, process: str) -> None:
        handle = await asyncio.to_thread(find_actor, self._name, process)
        if handle is None:
            return
        try:
            async with asyncio.timeout(1.0):
                await handle.close.remote()
        except (RayError, TimeoutError):
            pass  # it is dead or silent
        await asyncio.to_thread(ray.kill, handle)
        for _ in range(_NAME_TRIES):
            if process not in await asyncio.to_thread(living, self._name):
                return
            await asyncio.sleep(_NAME_PAUSE_S)

    async def reserve(self, cluster: RayCluster | None, used: Collection[str]) -> None:
        await asyncio.to_thread(self._places.reserve, cluster, used, kept_clusters)


class RemoteHost:
    """See `Host`."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    async def prepare(self, cluster: RayCluster, process: str, routers: Sequence[str]) -> Prepared:
        return await _asked(lambda: self._handle.prepare.remote(cluster, process, routers))

    async def run(self) -> ProcessEnd:
        return await _asked(lambda: self._handle.run.remote())

    async def report(self) -> HostReport:
        return await _asked(lambda: self._handle.report.remote())

    async def set_routers(self, routers: Sequence[str]) -> None:
        await _asked(lambda: self._handle.set_routers.remote(routers))

    async def drain(self, limit_s: float) -> ProcessEnd | None:
        return await _asked(lambda: self._handle.drain.remote(limit_s))


async def _asked(ask: Callable[[], Awaitable[T]]) -> T:
    try:
        return await ask()
    except RayTaskError as error:  # it lives, but can't do what it is for
        raise HostLost(_first_line(error.cause)) from error
    except RayError as error:
        raise HostLost(_first_line(error)) from error


def find_actor(cluster: str, process: str) -> Any | None:
    """The handle of a living one, or None; blocks."""
    try:
        return ray.get_actor(actor_name(cluster, process), NAMESPACE)
    except ValueError:
        return None


def living(cluster: str) -> set[str]:
    """What has an actor in this cluster: ids of processes, and `keeper`; blocks."""
    listed = ray.util.list_named_actors(all_namespaces=True)
    prefix = actor_name(cluster, "")
    return {
        each["name"].removeprefix(prefix)
        for each in listed
        if each["namespace"] == NAMESPACE and each["name"].startswith(prefix)
    }


def start_keeper(cluster: str) -> Any:
    """The handle of the keeper, which is started if there is none; blocks."""
    return (
        ray.remote(KeeperActor)
        .options(
            name=actor_name(cluster, KEEPER),
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=-1,
            max_task_retries=-1,
            num_cpus=0,
        )
        .remote(cluster)
    )


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
