"""The operator's whole loop (kopf, keeper, API client) against kmock: what it makes, in which order, and its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial
from random import Random
from typing import Any

import kmock
import kopf
import pytest
from prometheus_client import CollectorRegistry

from deploy.k8s.operator.api import Api
from deploy.k8s.operator.manifests import ServiceOwner
from deploy.k8s.operator.routers import AskRouters
from deploy.k8s.operator.spec import ServiceSpec
from deploy.k8s.operator.watching import FINALIZER, Watching
from pdserve.clock import SystemClock
from pdserve.status import ClusterStatus
from tests.support.kube.mock_api import GROUP, Controllers, MockApi, running_mock
from tests.support.waiting import until
from tests.unit.deploy.operator.services import OWNER
from tests.unit.deploy.scaling.statuses import status, worker

SERVICES = kmock.resource("pdserve.dev", "v1alpha1", "disaggregatedservices")
DEPLOYMENTS = kmock.resource("apps", "v1", "deployments")
PODS, SECRETS = kmock.resource("v1", "pods"), kmock.resource("v1", "secrets")
COST = "controller.kubernetes.io/pod-deletion-cost"
SPEC = {
    "model": "m",
    "images": {"router": "r:1", "worker": "w:1"},
    "access": {"insecure": True},
    "config": {"engine": {"kind": "fake"}},
}


class Cluster:
    """The mock with an operator on it."""

    def __init__(self, api: MockApi, registry: CollectorRegistry) -> None:
        self.api = api
        self.controllers = Controllers(api)
        self.registry = registry
        self.statuses: list[ClusterStatus | None] = []

    async def ask(self, owner: ServiceOwner, spec: ServiceSpec, pods: Any) -> list[ClusterStatus | None]:
        """What its routers would say; in the operator's thread."""
        return list(self.statuses)

    def add_pod(self, name: str, role: str, set_id: str) -> None:
        """One of a service's, that the operator sees."""
        labels = {**OWNER.labels(), "app.kubernetes.io/component": role, "pdserve.dev/set": set_id}
        pod = {"metadata": {"name": name, "namespace": "ns", "uid": name, "labels": labels}}
        self.api.objects[PODS, "ns", name] = {"apiVersion": "v1", "kind": "Pod", "spec": {}, **pod}

    def create(self, **spec: Any) -> None:
        self.api.objects[SERVICES, "ns", "one"] = {
            "apiVersion": GROUP,
            "kind": "DisaggregatedService",
            "metadata": {
                "name": "one",
                "namespace": "ns",
                "uid": "uid-one",
                "generation": 1,
                "resourceVersion": "1",
            },
            "spec": {**SPEC, **spec},
        }

    def change(self, **spec: Any) -> None:
        generation = self.service["metadata"]["generation"] + 1
        self.api.objects[SERVICES, "ns", "one"].patch({"metadata": {"generation": generation}, "spec": spec})

    @property
    def service(self) -> dict[str, Any]:
        [found] = self.api.all_of(GROUP, "DisaggregatedService")
        return found

    def condition(self, kind: str) -> dict[str, Any]:
        status = self.service.get("status", {})
        if status.get("observedGeneration") != self.service["metadata"]["generation"]:
            return {}
        return next((each for each in status["conditions"] if each["type"] == kind), {})

    def images(self) -> dict[str, str]:
        return {
            each["metadata"]["labels"]["app.kubernetes.io/component"]: each["spec"]["template"]["spec"][
                "containers"
            ][0]["image"]
            for each in self.api.all_of("apps/v1", "Deployment")
        }

    def runs(self, role: str, version: str) -> bool:
        return self.images()[role].endswith(version)

    def tells(self, role: str) -> bool:
        return role in self.condition("Progressing").get("message", "")

    async def until(self, what: str, holds: Callable[[], Any]) -> None:
        async def look() -> bool:
            self.controllers.act()
            return bool(holds())

        await until(what, look, told=lambda: str(self.api.all_of(GROUP, "DisaggregatedService"))[:3000])

    @property
    def is_settled(self) -> bool:
        ready, moving = self.condition("Available"), self.condition("Progressing")
        return (ready.get("status"), moving.get("status")) == ("True", "False")


def call_in(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    """In another thread's loop, if it still runs."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(call)


async def operate(
    connection: kopf.ConnectionInfo,
    registry: CollectorRegistry,
    ask: AskRouters,
    begun: Callable[[Callable[[], None]], None],
) -> None:
    """Watch until what `begun` was given is called, in any thread."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    begun(lambda: call_in(loop, stop.set))
    async with Api(lambda: connection) as api:
        watching = Watching(
            api,
            lambda: connection,
            SystemClock(),
            Random(1),
            registry,
            ask,
            namespace="ns",
            resync_s=0.2,
            has_budgets=True,
        )
        await watching.run(stop)


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    """The operator has a thread and a loop of its own: at its end kopf cancels all tasks of its loop."""
    registry, stoppers = CollectorRegistry(), list[Callable[[], None]]()
    async with running_mock() as (mock, connection):
        made = Cluster(mock, registry)
        operating = asyncio.create_task(
            asyncio.to_thread(lambda: asyncio.run(operate(connection, registry, made.ask, stoppers.append)))
        )
        yield made
        for stop in stoppers:
            stop()
        await operating


async def test_a_service_becomes_objects_that_belong_to_it(cluster: Cluster) -> None:
    cluster.create(pools={"decode": {"replicas": 3}})
    await cluster.until("settled", lambda: cluster.is_settled)
    assert cluster.service["metadata"]["finalizers"] == [FINALIZER]
    deployments = {each["metadata"]["name"]: each for each in cluster.api.all_of("apps/v1", "Deployment")}
    set_id = cluster.service["status"]["set"]
    assert {name: each["spec"]["replicas"] for name, each in deployments.items()} == {
        f"one-router-{set_id}": 2,
        f"one-prefill-{set_id}": 1,
        f"one-decode-{set_id}": 3,
    }
    owners = {
        reference["kind"]
        for each in deployments.values()
        for reference in each["metadata"]["ownerReferences"]
    }
    assert owners == {"DisaggregatedService", "WorkerPool"}
    assert len(cluster.api.all_of("policy/v1", "PodDisruptionBudget")) == 3
    labels = {"namespace": "ns", "service": "one", "type": "Available"}
    await cluster.until(
        "it is in the metrics",
        lambda: cluster.registry.get_sample_value("pdserve_operator_condition", labels) == 1,
    )


async def test_an_upgrade_waits_for_each_role(cluster: Cluster) -> None:
    cluster.create()
    await cluster.until("settled", lambda: cluster.is_settled)
    for role, others in (("decode", ("prefill", "router")), ("prefill", ("router",))):
        cluster.controllers.held = {role}
        cluster.change(images={"router": "r:2", "worker": "w:2"})
        await cluster.until(f"{role} is replaced", partial(cluster.runs, role, ":2"))
        await cluster.until("it is told", partial(cluster.tells, role))
        assert all(cluster.images()[other].endswith(":1") for other in others)
    cluster.controllers.held = set()
    await cluster.until("settled", lambda: cluster.is_settled and cluster.images()["router"] == "r:2")


async def test_another_dtype_makes_a_second_set_and_clients_go_over_when_it_is_ready(
    cluster: Cluster,
) -> None:
    cluster.create()
    await cluster.until("settled", lambda: cluster.is_settled)
    before = cluster.service["status"]["set"]
    cluster.controllers.held = {"decode"}
    cluster.change(config={"engine": {"dtype": "float32"}})
    await cluster.until("a second set", lambda: len(cluster.api.all_of("apps/v1", "Deployment")) == 6)
    assert cluster.service["status"]["set"] == before
    cluster.controllers.held = set()
    await cluster.until("switched", lambda: cluster.is_settled and cluster.service["status"]["set"] != before)
    assert len(cluster.api.all_of("apps/v1", "Deployment")) == 3


async def test_what_somebody_deletes_is_made_again(cluster: Cluster) -> None:
    cluster.create()
    await cluster.until("settled", lambda: cluster.is_settled)
    name = f"one-decode-{cluster.service['status']['set']}"
    cluster.api.objects[DEPLOYMENTS, "ns", name].delete()
    await cluster.until("made again", lambda: "decode" in cluster.images())


async def test_a_mistake_is_named_and_changes_nothing(cluster: Cluster) -> None:
    cluster.create(access={})
    await cluster.until("told", lambda: cluster.condition("Degraded").get("reason") == "InvalidSpec")
    assert "spec.access" in cluster.condition("Degraded")["message"]
    assert cluster.api.all_of("apps/v1", "Deployment") == []


async def test_a_secret_that_is_missing_is_named_until_it_is_there(cluster: Cluster) -> None:
    cluster.create(secretName="mine")
    await cluster.until("told", lambda: cluster.condition("Degraded").get("reason") == "SecretMissing")
    assert "Secret mine" in cluster.condition("Degraded")["message"]
    cluster.api.objects[SECRETS, "ns", "mine"] = {"metadata": {"name": "mine"}, "data": {"secret": "eA=="}}
    await cluster.until("mended", lambda: cluster.condition("Degraded").get("status") == "False")


async def test_pods_with_the_least_to_do_are_marked_before_their_pool_shrinks(cluster: Cluster) -> None:
    cluster.create(pools={"decode": {"replicas": 3}})
    await cluster.until("settled", lambda: cluster.is_settled)
    set_id = cluster.service["status"]["set"]
    for number, running in enumerate((2, 0, 5)):
        name = f"one-decode-{set_id}-{number}"
        cluster.add_pod(name, "decode", set_id)
        cluster.statuses.append(status(worker(name, role="decode", running=running), router=f"r{number}"))
    cluster.change(pools={"decode": {"replicas": 2}})
    await cluster.until("settled", lambda: cluster.is_settled)
    assert sorted(each["spec"]["replicas"] for each in cluster.api.all_of("apps/v1", "Deployment")) == [
        1,
        2,
        2,
    ]
    costs = {
        each["metadata"]["name"][-1]: each["metadata"]["annotations"][COST]
        for each in cluster.api.all_of("v1", "Pod")
        if COST in each["metadata"].get("annotations", {})
    }
    assert costs == {"0": "2", "2": "5"}  # the idle one has 0, as all have
    patches = [each for each in cluster.api if each.method is kmock.method.PATCH]
    marked = [index for index, each in enumerate(patches) if each.resource == PODS]
    scaled = [index for index, each in enumerate(patches) if each.subresource == "scale"]
    assert len(marked) == 2 and max(marked) < max(scaled)


async def test_a_deleted_service_is_drained_routers_first(cluster: Cluster) -> None:
    cluster.create()
    await cluster.until("settled", lambda: cluster.is_settled)
    now = {"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}
    cluster.api.objects[SERVICES, "ns", "one"].patch(now)
    await cluster.until("gone", lambda: cluster.api.all_of(GROUP, "DisaggregatedService") == [])
    assert cluster.api.all_of("apps/v1", "Deployment") == []
    deleted = [
        str(request.name).split("-")[1]
        for request in cluster.api
        if request.method is kmock.method.DELETE and request.resource == DEPLOYMENTS
    ]
    assert deleted[0] == "router"


async def test_a_watch_that_is_too_old_begins_again(cluster: Cluster) -> None:
    """410: kopf lists again, and what happened meanwhile is seen."""
    gone = {
        "type": "ERROR",
        "object": {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"},
    }
    cluster.create()
    await cluster.until("settled", lambda: cluster.is_settled)
    cluster.api[SERVICES, kmock.action.WATCH] << (gone,)
    cluster.change(routers={"replicas": 3})
    await cluster.until(
        "seen all the same",
        lambda: any(
            each["spec"].get("replicas") == 3 for each in cluster.api.all_of("apps/v1", "Deployment")
        ),
    )
