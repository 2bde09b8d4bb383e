"""kmock's API server in the test's own process, with the few rules more that the operator relies on.

What it lacks of a real one (schemas, conflicts of field managers, controllers, garbage collection) is tested on the
real one, in tests/k8s.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import AsyncIterator
from typing import Any

import aiohttp.web
import attrs
import kmock
import kopf

GROUP = "pdserve.dev/v1alpha1"
_KINDS = {
    "v1": {
        "ConfigMap": "configmaps",
        "Event": "events",
        "Namespace": "namespaces",
        "Pod": "pods",
        "Secret": "secrets",
        "Service": "services",
    },
    "apps/v1": {"Deployment": "deployments"},
    "apiextensions.k8s.io/v1": {"CustomResourceDefinition": "customresourcedefinitions"},
    "coordination.k8s.io/v1": {"Lease": "leases"},
    "policy/v1": {"PodDisruptionBudget": "poddisruptionbudgets"},
    GROUP: {"DisaggregatedService": "disaggregatedservices", "WorkerPool": "workerpools"},
}
_VERBS = {"get", "list", "watch", "create", "patch", "update", "delete"}


@attrs.define(kw_only=True)
class MockApi(kmock.KubernetesEmulator):
    """Server-side apply makes what isn't there; objects get a uid; a changed spec gets a new generation."""

    num_made: int = 0

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        for version, kinds in _KINDS.items():
            for kind, plural in kinds.items():
                subresources = {"status", "scale"} if kind in ("Deployment", "WorkerPool") else {"status"}
                self.resources[f"{version}/{plural}"] = kmock.ResourceInfo(
                    kind=kind,
                    singular=kind.lower(),
                    namespaced=True,
                    verbs=_VERBS,
                    subresources=subresources,
                )

    async def _handle(self, request: kmock.Request) -> aiohttp.web.StreamResponse:
        if isinstance(request.data, dict) and request.method in (kmock.method.POST, kmock.method.PATCH):
            self._complete(request)
        return await super()._handle(request)

    def _complete(self, request: kmock.Request) -> None:
        data, resource = request.data, request.resource
        if resource is None or request.subresource is not None:
            return
        if prefix := data.get("metadata", {}).get("generateName"):
            data["metadata"]["name"] = f"{prefix}{self.num_made}"
        name = request.name or data.get("metadata", {}).get("name")
        key = (resource, request.namespace, name)
        known = key in self.objects and not self.objects[key].deleted
        metadata = data.setdefault("metadata", {})
        if not known:
            self.num_made += 1
            metadata |= {
                "uid": f"uid-{self.num_made}",
                "resourceVersion": str(self.num_made),
                "generation": 1,
            }
            if request.method is kmock.method.PATCH:
                self.objects[key] = copy.deepcopy(data)
        elif "spec" in data:
            before = self.objects[key].raw
            metadata["generation"] = before["metadata"].get("generation", 1) + 1
            if _covers(before["spec"], data["spec"]):
                del metadata["generation"]

    def all_of(self, version: str, kind: str) -> list[dict[str, Any]]:
        """Objects that are there."""
        plural = _KINDS[version][kind]
        wanted = kmock.resource(*version.rpartition("/")[::2], plural)
        return [
            obj.raw
            for (resource, _, _), obj in self.objects.items()
            if resource == wanted and not obj.deleted
        ]


def _covers(seen: Any, wanted: Any) -> bool:
    if isinstance(wanted, dict) and isinstance(seen, dict):
        return all(key in seen and _covers(seen[key], value) for key, value in wanted.items())
    return bool(seen == wanted)


class Controllers:
    """What the controllers of a cluster would do: every Deployment's pods are up to date and ready at once.

    held  roles whose new pods don't become ready
    """

    def __init__(self, api: MockApi) -> None:
        self._api = api
        self.held: set[str] = set()

    def act(self) -> None:
        """Write the statuses that differ."""
        for deployment in self._api.all_of("apps/v1", "Deployment"):
            metadata, spec = deployment["metadata"], deployment["spec"]
            if metadata["labels"]["app.kubernetes.io/component"] in self.held:
                continue
            count = spec.setdefault("replicas", 1)
            names = ("replicas", "updatedReplicas", "availableReplicas", "readyReplicas")
            status = {"observedGeneration": metadata["generation"], **dict.fromkeys(names, count)}
            if deployment.get("status") != status:
                key = (kmock.resource("apps", "v1", "deployments"), metadata["namespace"], metadata["name"])
                self._api.objects[key].patch({"spec": {"replicas": count}, "status": status})


@contextlib.asynccontextmanager
async def running_mock() -> AsyncIterator[tuple[MockApi, kopf.ConnectionInfo]]:
    """The API, and how it is reached."""
    async with MockApi() as api, kmock.Server(api) as server:
        yield api, kopf.ConnectionInfo(server=str(server.url).rstrip("/"))
