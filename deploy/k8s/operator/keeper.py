"""Keeps one DisaggregatedService as its spec says: looks at all of its objects, and does what comes next."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from datetime import UTC, datetime
from enum import Enum
from typing import Protocol

import structlog

from deploy.k8s.operator.api import Api
from deploy.k8s.operator.manifests import (
    ROLES,
    Manifest,
    ServiceOwner,
    client_service,
    cluster_secret,
    config_map,
    covers,
    deployment,
    disruption_budget,
    role_of,
    set_of,
    worker_pool,
    workers_service,
)
from deploy.k8s.operator.rollout import is_retired, old_sets, retire, roll_out, serving_set
from deploy.k8s.operator.routers import AskRouters
from deploy.k8s.operator.scaling import PoolScaler
from deploy.k8s.operator.secrets import trouble_of_secrets
from deploy.k8s.operator.seen import Seen, look
from deploy.k8s.operator.spec import GROUP, VERSION, WORKER_ROLES, InvalidSpec, ServiceSpec, read_spec
from deploy.k8s.operator.status import (
    Condition,
    Trouble,
    available,
    degraded,
    made_status,
    progressing,
    trouble_of,
)
from deploy.k8s.operator.victims import mark
from pdserve.clock import Clock
from pdserve.ids import Random

_SECRET_BYTES = 32

log = structlog.get_logger()


class PassOutcome(Enum):
    """What a pass came to."""

    GONE = "gone"
    DRAINING = "draining"
    DRAINED = "drained"
    INVALID = "invalid"
    CHANGING = "changing"
    KEPT = "kept"


class Announce(Protocol):
    """Tells people: as an event of the object."""

    def __call__(self, kind: str, reason: str, message: str) -> None:
        """kind  Normal or Warning"""
        ...


class ServiceKeeper:
    """One event loop; passes of one service never overlap. It remembers nothing that its next life would need."""

    def __init__(
        self,
        api: Api,
        namespace: str,
        name: str,
        clock: Clock,
        random: Random,
        announce: Announce,
        ask: AskRouters,
        *,
        has_budgets: bool,
    ) -> None:
        self._api = api
        self._namespace, self._name = namespace, name
        self._clock = clock
        self._random = random
        self._announce = announce
        self._ask = ask
        self._has_budgets = has_budgets
        self._lock = asyncio.Lock()
        self._scaler = PoolScaler(api, ask, clock)
        self.look_within_s = math.inf  # from one pass to the next, at most
        self.conditions: Mapping[str, bool] = {}

    async def run_pass(self) -> PassOutcome:
        """Once. Raises ApiError and what else Api raises; nothing is lost, the next pass begins again."""
        async with self._lock:
            service = await self._api.get(
                f"{GROUP}/{VERSION}", "DisaggregatedService", self._namespace, self._name
            )
            if service is None:
                return PassOutcome.GONE
            owner = ServiceOwner(name=self._name, namespace=self._namespace, uid=service["metadata"]["uid"])
            seen = await look(self._api, owner, has_budgets=self._has_budgets)
            if service["metadata"].get("deletionTimestamp"):
                return await self._drain(service, seen)
            try:
                spec = read_spec(service["spec"])
            except InvalidSpec as error:
                await self._tell_invalid(service, owner, seen, str(error))
                return PassOutcome.INVALID
            return await self._keep(service, owner, spec, seen)

    async def _keep(
        self, service: Manifest, owner: ServiceOwner, spec: ServiceSpec, seen: Seen
    ) -> PassOutcome:
        set_id = spec.set_id
        serving = serving_set(seen.service(owner.name)) or set_id
        await self._ensure_secret(owner, spec)
        for manifest in (config_map(owner, spec), workers_service(owner, set_id)):
            await self._api.apply(manifest)
        if self._has_budgets:
            for role in ROLES:
                await self._api.apply(disruption_budget(owner, set_id, role))
        pools = {role: await self._keep_pool(owner, spec, role, seen, serving) for role in WORKER_ROLES}
        deployments, held, waiting = await self._keep_deployments(owner, spec, seen, pools)
        for role, pool in pools.items():
            await self._tell_pool(pool, deployments[role])
        switching = set_id if serving != set_id else ""
        self.look_within_s = spec.config.scaling.interval_s if spec.is_scaled else math.inf
        if spec.is_scaled and not switching and not held:
            await self._scaler.look(owner, spec, seen.pods_of(set_id), pools)
        if switching and not waiting:
            log.info("service.switched", service=owner.name, before=serving, after=set_id)
            self._announce("Normal", "Switched", f"clients are served by set {set_id} instead of {serving}")
            serving, switching = set_id, ""
        await self._api.apply(client_service(owner, spec, serving))
        leaving = old_sets([*seen.of_sets, *seen.pods], (set_id, serving))
        for old in leaving:
            objects = [each for each in seen.of_sets if set_of(each) == old]
            for each in retire(objects, seen.pods_of(old)):
                await self._api.delete(each)
        current = config_map(owner, spec)["metadata"]["name"]
        for each in seen.unused_config_maps:
            if each["metadata"]["name"] != current:
                await self._api.delete(each)
        serving_now = deployments if serving == set_id else seen.by_role(serving)
        conditions = (
            available(serving_now),
            progressing(waiting, deployments, switching, leaving),
            degraded(
                await trouble_of_secrets(self._api, owner, spec)
                or trouble_of(deployments.values(), seen.pods_of(set_id))
            ),
        )
        await self._tell(
            service, conditions, serving_now, serving, scaling=self._scaler.why if spec.is_scaled else ""
        )
        return PassOutcome.CHANGING if waiting or switching or leaving else PassOutcome.KEPT

    async def _ensure_secret(self, owner: ServiceOwner, spec: ServiceSpec) -> None:
        if spec.secret_name or await self._api.get("v1", "Secret", owner.namespace, owner.secret_name(spec)):
            return
        drawn = self._random.getrandbits(8 * _SECRET_BYTES).to_bytes(_SECRET_BYTES, "little").hex()
        await self._api.create(cluster_secret(owner, drawn.encode()))

    async def _keep_pool(
        self, owner: ServiceOwner, spec: ServiceSpec, role: str, seen: Seen, serving: str
    ) -> Manifest:
        """The WorkerPool as it is now, with a number of replicas that the spec allows."""
        wanted = spec.pools[role]
        name = owner.named(role, spec.set_id)
        before = seen.pool(name)
        manifest = worker_pool(owner, spec, role, wanted.least if wanted.is_fixed else None)
        if before is not None and covers(before, manifest):
            pool = before  # not applied again: what somebody sets meanwhile must be seen, to be told that it's undone
        else:
            asked = wanted.least if before is None else before["spec"].get("replicas", wanted.least)
            if before is not None and before["spec"]["scaledBy"] == "Service" and asked != wanted.least:
                self._tell_not_scaled(before, asked, wanted.least)
            pool = await self._api.apply(manifest)
        if wanted.is_fixed:
            return pool
        asked = pool["spec"].get("replicas")
        if asked is None:  # a new pool begins as large as the one that it stands in for
            older = seen.by_role(spec.set_id).get(role) or seen.by_role(serving).get(role)
            asked = wanted.least if older is None else older["spec"].get("replicas", wanted.least)
        allowed = wanted.bounded(asked)
        if pool["spec"].get("replicas") != allowed:
            await self._api.scale(pool, allowed)
            pool["spec"]["replicas"] = allowed
        return pool

    def _tell_not_scaled(self, pool: Manifest, asked: int, kept: int) -> None:
        role = role_of(pool)
        self._announce(
            "Warning",
            "ScaleUndone",
            f"{pool['metadata']['name']} was set to {asked} replicas and is set back to {kept}: change "
            f"spec.pools.{role}.replicas, or give min and max instead",
        )

    async def _keep_deployments(
        self, owner: ServiceOwner, spec: ServiceSpec, seen: Seen, pools: Mapping[str, Manifest]
    ) -> tuple[dict[str, Manifest], tuple[str, ...], str]:
        """Deployments by role as they are now, roles that wait for others, and the one whose pods are replaced."""
        wanted = {role: deployment(owner, spec, role, pools.get(role)) for role in ROLES}
        before = seen.by_role(spec.set_id)
        held = roll_out(wanted, before).held
        now: dict[str, Manifest] = {}
        for role in ROLES:
            now[role] = before[role] if role in held else await self._api.apply(wanted[role])
            replicas = pools[role]["spec"]["replicas"] if role in pools else spec.num_routers
            if now[role]["spec"].get("replicas") != replicas:
                await self._set_replicas(owner, spec, now[role], replicas, seen)
        return now, held, roll_out(wanted, now).waiting

    async def _set_replicas(
        self, owner: ServiceOwner, spec: ServiceSpec, deployment: Manifest, replicas: int, seen: Seen
    ) -> None:
        before = deployment["spec"].get("replicas", 1)
        role, name = role_of(deployment), deployment["metadata"]["name"]
        if replicas < before and role != "router":
            pods = seen.pods_of(spec.set_id)
            answers = await self._ask(owner, spec, pods)
            await mark(self._api, [pod for pod in pods if role_of(pod) == role], answers)
        log.info("deployment.scaled", deployment=name, before=before, after=replicas)
        self._announce("Normal", "Scaled", f"{name}: {before} to {replicas} pods")
        await self._api.scale(deployment, replicas)
        deployment["spec"]["replicas"] = replicas

    async def _drain(self, service: Manifest, seen: Seen) -> PassOutcome:
        pods = list(seen.pods)
        if is_retired(seen.of_sets, pods):
            return PassOutcome.DRAINED
        for each in retire(seen.of_sets, pods):
            await self._api.delete(each)
        serving = serving_set(seen.service(self._name))
        left = {role: sum(role_of(pod) == role for pod in pods) for role in reversed(ROLES)}
        message = ", ".join(f"{count} {role}" for role, count in left.items() if count)
        conditions = (
            available(seen.by_role(serving)),
            Condition(
                "Progressing", True, "Draining", f"pods that finish their requests: {message or 'none'}"
            ),
            degraded(None),
        )
        await self._tell(service, conditions, seen.by_role(serving), serving)
        return PassOutcome.DRAINING

    async def _tell_invalid(self, service: Manifest, owner: ServiceOwner, seen: Seen, message: str) -> None:
        serving = serving_set(seen.service(owner.name))
        conditions = (
            available(seen.by_role(serving)),
            Condition("Progressing", False, "InvalidSpec", "nothing is changed until the spec is valid"),
            degraded(Trouble("InvalidSpec", message)),
        )
        await self._tell(service, conditions, seen.by_role(serving), serving)

    async def _tell(
        self,
        service: Manifest,
        conditions: tuple[Condition, ...],
        deployments: Mapping[str, Manifest],
        set_id: str,
        scaling: str = "",
    ) -> None:
        before = service.get("status", {})
        status = made_status(
            before,
            conditions,
            generation=service["metadata"].get("generation", 0),
            now=datetime.fromtimestamp(self._clock.wall_ns() / 1e9, UTC),
            deployments=deployments,
            set_id=set_id,
            scaling=scaling,
        )
        old = {each["type"]: each for each in before.get("conditions", ())}
        for each in conditions:
            was = old.get(each.type, {})
            changed = (was.get("status"), was.get("reason")) != (str(each.holds), each.reason)
            if changed and (was or each.holds):  # of a new service, not what it lacks yet
                is_bad = (
                    each.holds if each.type == "Degraded" else was.get("status") == "True" and not each.holds
                )
                is_bad = is_bad and each.type != "Progressing"
                self._announce("Warning" if is_bad else "Normal", each.reason, f"{each.type}: {each.message}")
        self.conditions = {each.type: each.holds for each in conditions}
        if any(before.get(key) != value for key, value in status.items()):
            await self._api.set_status(service, status)

    async def _tell_pool(self, pool: Manifest, deployment: Manifest) -> None:
        now = deployment.get("status", {})
        labels = deployment["spec"]["selector"]["matchLabels"]
        status = {
            "replicas": now.get("replicas", 0),
            "ready": now.get("readyReplicas", 0),
            "selector": ",".join(f"{key}={value}" for key, value in sorted(labels.items())),
        }
        if pool.get("status") != status:
            await self._api.set_status(pool, status)
