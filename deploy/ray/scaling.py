"""Scaling on Ray: its routers are looked at, and the keeper starts and drains workers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import structlog

from deploy.ray.keeper import Keeper
from deploy.ray.node_folder import NodeFolder
from deploy.ray.spec import SECRET, RayCluster
from deploy.scaling.decide import Decision
from deploy.scaling.loop import ScalingLoop
from deploy.scaling.routers import OperatorRouters
from deploy.scaling.targets import Counts, Range, ScalingTargets
from pdserve.clock import Clock
from pdserve.errors import InvalidRequest, PdserveError
from pdserve.messages import Role
from pdserve.operator_client import OperatorClient
from pdserve.service.config import load
from pdserve.service.tls import worker_tls
from pdserve.status import ClusterStatus

_AGAIN_S = 10.0

log = structlog.get_logger()


async def follow_load(keeper: Keeper, clock: Clock, parent: Path, name: str) -> None:
    """Whenever the keeper's cluster is one to be scaled; returns never. Event-loop thread of the keeper.

    parent, name  of the folder in which the cluster's files are kept meanwhile
    """
    while True:
        cluster = await keeper.until_scaled()
        folder = NodeFolder(parent, name)
        try:
            async with OperatorRouters((), _connect_as(cluster, folder)) as routers:
                loop = ScalingLoop(
                    _KeptRouters(keeper, routers),
                    _RayWorkers(keeper),
                    _Told(keeper, routers),
                    targets_of(cluster),
                    clock,
                    asyncio.sleep,
                )
                await loop.run(partial(keeper.is_scaled_otherwise, cluster))
        except (PdserveError, OSError) as error:  # of its files: said in the status, and tried again
            log.warning("ray.not_scaled", error=str(error))
            keeper.scaling = f"can't ask the routers: {error}"
            await asyncio.sleep(_AGAIN_S)
        finally:
            folder.remove()


def _connect_as(cluster: RayCluster, folder: NodeFolder) -> Callable[[str], OperatorClient]:
    """How its operators reach a router. Raises PdserveError for certificates that can't be used, OSError."""
    files = {name: str(folder.write(name, content)) for name, content in cluster.files.items()}
    config = load(folder.write("config.toml", cluster.toml().encode()), flags=files)
    tls, secret = worker_tls(config.tls), cluster.files[SECRET].strip()
    return lambda target: OperatorClient(target, secret=secret, tls=tls)


def targets_of(cluster: RayCluster) -> ScalingTargets:
    """What its numbers are to keep. Workers don't change their roles: what Ray sets aside is for one of them."""
    how = load(flags={name: value for name, value in cluster.settings.items() if name.startswith("scaling.")})
    return ScalingTargets(
        prefill=Range(*cluster.ranges["prefill"]),
        decode=Range(*cluster.ranges["decode"]),
        how=replace(how.scaling, change_roles=False),
    )


class _RayWorkers:
    """See `Actuator`."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper

    @property
    def counts(self) -> Counts:
        cluster = self._keeper.cluster
        assert cluster is not None
        return Counts(prefill=cluster.counts["prefill"], decode=cluster.counts["decode"])

    async def scale(self, counts: Counts, victims: Mapping[Role, Sequence[str]]) -> None:
        await self._keeper.follow_load(
            {"prefill": counts.prefill, "decode": counts.decode},
            {role.value: ids for role, ids in victims.items()},
        )

    async def set_role(self, worker_id: str, role: Role) -> None:
        raise InvalidRequest("on Ray a worker keeps its role", worker=worker_id)


@dataclass(frozen=True, slots=True)
class _Told:
    """See `Audience`: decisions show in the keeper's state and the routers'."""

    keeper: Keeper
    routers: OperatorRouters

    async def tell(self, decision: Decision) -> None:
        self.keeper.scaling = decision.why
        await self.routers.tell(decision)


class _KeptRouters:
    """See `Routers`: those of the keeper, which may move."""

    def __init__(self, keeper: Keeper, routers: OperatorRouters) -> None:
        self._keeper = keeper
        self._routers = routers

    async def ask(self) -> Sequence[ClusterStatus | None]:
        await self._routers.follow(self._keeper.operators())
        return await self._routers.ask()
