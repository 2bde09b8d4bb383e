"""Scales the pools of one service by its targets: the scaling core with Kubernetes objects as its hands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import aiohttp

from deploy.k8s.operator.api import ApiError
from deploy.k8s.operator.manifests import Manifest, ServiceOwner
from deploy.k8s.operator.routers import AskRouters
from deploy.k8s.operator.spec import ServiceSpec
from deploy.scaling.decide import Decision
from deploy.scaling.loop import ScalingLoop
from deploy.scaling.targets import SCALED, Counts, Range, ScalingTargets
from pdserve.clock import Clock
from pdserve.errors import InvalidRequest
from pdserve.messages import Role
from pdserve.status import ClusterStatus


class Scales(Protocol):
    """Where numbers of replicas are written. Raises what Api raises."""

    async def scale(self, manifest: Manifest, replicas: int) -> None:
        """Change the number of replicas, and nothing else."""
        ...


class PoolScaler:
    """One event loop; one service. What it remembers of earlier looks may be lost: it begins with patience again."""

    def __init__(self, api: Scales, ask: AskRouters, clock: Clock) -> None:
        self._view = _View(api, ask)
        self._clock = clock
        self._loop: ScalingLoop | None = None
        self._set_id = ""
        self._looked_s: float | None = None
        self.why = ""

    async def look(
        self, owner: ServiceOwner, spec: ServiceSpec, pods: Sequence[Manifest], pools: Mapping[str, Manifest]
    ) -> None:
        """Decide, and write the scale of pools; at most once in `scaling.interval_s`.

        pods   of the set that serves
        pools  its WorkerPools, as they are now
        """
        now_s, how = self._clock.now_s(), spec.config.scaling
        if (
            self._looked_s is not None
            and now_s - self._looked_s < how.interval_s
            and self._set_id == spec.set_id
        ):
            return
        self._looked_s = now_s
        ranges = {role: Range(spec.pools[role.value].least, spec.pools[role.value].most) for role in SCALED}
        targets = ScalingTargets(prefill=ranges[Role.PREFILL], decode=ranges[Role.DECODE], how=how)
        if self._loop is None or self._set_id != spec.set_id:
            self._loop = ScalingLoop(self._view, self._view, self._view, targets, self._clock, _never)
            self._set_id = spec.set_id
        self._loop.targets = targets
        self._view.show(owner, spec, pods, pools)
        if await self._loop.look() is None:
            self.why = "no router answers, so nothing is decided"
        else:
            self.why = self._view.why


class _View:
    """What the core asks and orders: of routers by their pods, of pools by their scale."""

    def __init__(self, api: Scales, ask: AskRouters) -> None:
        self._api = api
        self._ask = ask
        self.why = ""

    def show(
        self, owner: ServiceOwner, spec: ServiceSpec, pods: Sequence[Manifest], pools: Mapping[str, Manifest]
    ) -> None:
        self._owner, self._spec, self._pods, self._pools = owner, spec, pods, pools

    async def ask(self) -> Sequence[ClusterStatus | None]:
        return await self._ask(self._owner, self._spec, self._pods)

    @property
    def counts(self) -> Counts:
        wanted = {role: int(self._pools[role.value]["spec"]["replicas"]) for role in SCALED}
        return Counts(prefill=wanted[Role.PREFILL], decode=wanted[Role.DECODE])

    async def scale(self, counts: Counts, victims: Mapping[Role, Sequence[str]]) -> None:
        """The pods to go are marked when the Deployment follows its pool: by whatever made the pool smaller."""
        for role in SCALED:
            pool = self._pools[role.value]
            if pool["spec"]["replicas"] == counts.of(role):
                continue
            try:
                await self._api.scale(pool, counts.of(role))
            except (ApiError, aiohttp.ClientError, TimeoutError) as error:
                raise OSError(str(error) or "no answer in time") from error
            pool["spec"]["replicas"] = counts.of(role)

    async def set_role(self, worker_id: str, role: Role) -> None:
        raise InvalidRequest("a pod has the role of its pool", worker=worker_id, role=role.value)

    async def tell(self, decision: Decision) -> None:
        self.why = decision.why


async def _never(seconds: float) -> None:
    raise AssertionError("the keeper's passes set the pace")
