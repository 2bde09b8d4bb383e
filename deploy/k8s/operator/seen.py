"""All objects of one service, as the API server has them at one moment."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from deploy.k8s.operator.api import Api
from deploy.k8s.operator.manifests import Manifest, ServiceOwner, role_of, set_of
from deploy.k8s.operator.spec import GROUP, VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """budgets  empty where the server has no such kind"""

    deployments: list[Manifest]
    pools: list[Manifest]
    pods: list[Manifest]
    services: list[Manifest]
    config_maps: list[Manifest]
    budgets: list[Manifest]

    @property
    def of_sets(self) -> list[Manifest]:
        """What belongs to one set or another, pods apart."""
        found = [*self.deployments, *self.pools, *self.services, *self.budgets]
        return [each for each in found if set_of(each)]

    def by_role(self, set_id: str) -> dict[str, Manifest]:
        """The Deployments of a set."""
        return {role_of(each): each for each in self.deployments if set_of(each) == set_id}

    def pods_of(self, set_id: str) -> list[Manifest]:
        """Those that end included."""
        return [pod for pod in self.pods if set_of(pod) == set_id]

    def pool(self, name: str) -> Manifest | None:
        """The WorkerPool of that name."""
        return next((each for each in self.pools if each["metadata"]["name"] == name), None)

    def service(self, name: str) -> Manifest | None:
        """The Service of that name."""
        return next((each for each in self.services if each["metadata"]["name"] == name), None)

    @property
    def unused_config_maps(self) -> list[Manifest]:
        """Those that no Deployment and no running pod mounts."""
        specs = [each["spec"]["template"]["spec"] for each in self.deployments]
        specs += [pod["spec"] for pod in self.pods]
        used = {name for spec in specs for name in _config_maps_of(spec)}
        return [each for each in self.config_maps if each["metadata"]["name"] not in used]


def _config_maps_of(pod: Manifest) -> list[str]:
    return [each["configMap"]["name"] for each in pod.get("volumes", ()) if "configMap" in each]


async def look(api: Api, owner: ServiceOwner, *, has_budgets: bool) -> Seen:
    """Raises what Api raises."""
    kinds: Mapping[str, tuple[str, str]] = {
        "deployments": ("apps/v1", "Deployment"),
        "pools": (f"{GROUP}/{VERSION}", "WorkerPool"),
        "pods": ("v1", "Pod"),
        "services": ("v1", "Service"),
        "config_maps": ("v1", "ConfigMap"),
    }
    if has_budgets:
        kinds = {**kinds, "budgets": ("policy/v1", "PodDisruptionBudget")}
    async with asyncio.TaskGroup() as tasks:
        asked = {
            name: tasks.create_task(api.listed(*kind, owner.namespace, owner.selector))
            for name, kind in kinds.items()
        }
    return Seen(**{"budgets": [], **{name: task.result() for name, task in asked.items()}})
