"""A namespace with our kinds, the installed roles, and the operator as a process that has these rights only."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from random import Random
from typing import Any

import yaml

from deploy.local.child import Child
from deploy.local.plan import ProcessSpec
from pdserve.client import AsyncClient
from tests.support.asking import Question, ask
from tests.support.helm import OPERATOR_CHART, render
from tests.support.kube.client import KubeClient, Object
from tests.support.kube.control_plane import ControlPlane
from tests.support.kube.kubelet import Kubelet, running_kubelet
from tests.support.waiting import until

_ROOT = Path(__file__).parents[3]
NAMESPACE = "serving"
_RBAC = "/apis/rbac.authorization.k8s.io/v1"
SERVICES = f"/apis/pdserve.dev/v1alpha1/namespaces/{NAMESPACE}/disaggregatedservices"
POOLS = f"/apis/pdserve.dev/v1alpha1/namespaces/{NAMESPACE}/workerpools"
DEPLOYMENTS = f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments"
CORE = f"/api/v1/namespaces/{NAMESPACE}"
# What the operator's chart makes for its rights, and where.
_RIGHTS = {
    "ServiceAccount": CORE,
    **dict.fromkeys(("Role", "RoleBinding"), f"{_RBAC}/namespaces/{NAMESPACE}"),
}
LIMIT_S = 120.0


class Operator:
    """One operator process."""

    def __init__(self, child: Child, log: Path) -> None:
        self.child = child
        self.log = log
        self._output: asyncio.Future[None] | None = None

    @classmethod
    async def start(cls, kubeconfig: Path, log: Path) -> Operator:
        """Looks after NAMESPACE only, with its Lease there."""
        command = (
            *(sys.executable, "-m", "tests.support.kube.operator_process"),
            NAMESPACE,
        )
        environ = {
            **os.environ,
            "KUBECONFIG": str(kubeconfig),
            "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": str(_ROOT),
        }
        spec = ProcessSpec(role="operator", id="", command=command, metrics="", environ=environ)
        made = cls(await Child.start(spec), log)
        made._output = asyncio.ensure_future(made._keep_log())
        return made

    async def _keep_log(self) -> None:
        with self.log.open("a") as file:
            await self.child.pass_on_output(lambda line: print(line, file=file, flush=True))

    def says(self, text: str) -> bool:
        """Whether its log has this."""
        return self.log.exists() and text in self.log.read_text()

    @property
    def has_ended(self) -> bool:
        """Whether its output is over."""
        assert self._output is not None
        return self._output.done()

    async def stop(self) -> int:
        """SIGTERM; the exit code."""
        self.child.terminate()
        return await self.ended()

    async def kill(self) -> None:
        """SIGKILL."""
        self.child.kill()
        await self.ended()

    async def ended(self) -> int:
        """Its exit code, when it has ended."""
        try:
            async with asyncio.timeout(60):
                code = await self.child.wait()
        except TimeoutError:
            self.child.kill()
            raise
        assert self._output is not None
        await self._output
        return code


class World:
    """What tests act on. token: of the account that has the operator's roles"""

    def __init__(
        self, plane: ControlPlane, client: KubeClient, kubelet: Kubelet, token: str, folder: Path
    ) -> None:
        self.plane = plane
        self.token = token
        self.client = client
        self.kubelet = kubelet
        self._folder = folder
        self._random = Random(11)
        self._ending = asyncio.Event()
        self.operators: list[Operator] = []

    async def start_operator(self, server: str = "") -> Operator:
        """One more; server: what stands between it and the API server."""
        log = self._folder / f"operator-{len(self.operators)}.log"
        kubeconfig = self.plane.kubeconfig("operator", self.token, NAMESPACE, server)
        operator = await Operator.start(kubeconfig, log)
        self.operators.append(operator)
        return operator

    # --- services

    async def create(self, name: str, **spec: Any) -> Object:
        """A DisaggregatedService with the fake engine."""
        full = {
            "model": "fake",
            "images": {"router": "router:1", "worker": "worker:1"},
            "routers": {"replicas": 1},
            "access": {"insecure": True},
            "drain": {"seconds": 20},
            "config": {"engine": {"kind": "fake", "num_blocks": 256}, "timeouts": {"heartbeat_s": 0.2}},
            **spec,
        }
        body = {
            "apiVersion": "pdserve.dev/v1alpha1",
            "kind": "DisaggregatedService",
            "metadata": {"name": name},
            "spec": full,
        }
        return dict(await self.client.ask("POST", SERVICES, body))

    async def change(self, name: str, **spec: Any) -> Object:
        """A merge patch of a service's spec."""
        return dict(await self.client.patch(f"{SERVICES}/{name}", {"spec": spec}))

    async def delete(self, name: str) -> None:
        """Ask for it."""
        await self.client.ask("DELETE", f"{SERVICES}/{name}")

    async def condition(self, name: str, kind: str) -> Object:
        """One of a service's, {} while it has none of the newest generation."""
        service = await self.client.get(f"{SERVICES}/{name}") or {}
        status = service.get("status", {})
        if status.get("observedGeneration") != service.get("metadata", {}).get("generation"):
            return {}
        return next((dict(each) for each in status.get("conditions", ()) if each["type"] == kind), {})

    async def settled(self, name: str) -> None:
        """Until it is available and nothing is under way."""

        async def look() -> bool:
            ready = await self.condition(name, "Available")
            moving = await self.condition(name, "Progressing")
            return ready.get("status") == "True" and moving.get("status") == "False"

        await self.until(f"{name} settled", look)

    async def until(self, what: str, look: Callable[[], Any], limit_s: float = LIMIT_S) -> Any:
        """As tests.support.waiting, with all logs in the error."""
        return await until(what, look, limit_s=limit_s, told=self.told)

    def told(self) -> str:
        """The end of every log."""
        logs = [operator.log for operator in self.operators if operator.log.exists()]
        logs += [pod.log for pod in self.kubelet.pods.values() if pod.log.exists()]
        failures = [repr(each) for each in self.kubelet.failures]
        return "\n".join([*failures, *(f"--- {log}\n{log.read_text()[-3000:]}" for log in logs)])

    # --- objects

    async def deployments(self, service: str) -> dict[str, Object]:
        """By role; the last of equal ones."""
        found = await self.client.items(DEPLOYMENTS, f"app.kubernetes.io/instance={service}")
        return {each["metadata"]["labels"]["app.kubernetes.io/component"]: each for each in found}

    async def pods(self, service: str) -> list[Object]:
        """Those that end included."""
        return await self.client.items(f"{CORE}/pods", f"app.kubernetes.io/instance={service}")

    async def events(self, reason: str) -> list[str]:
        """Messages of events."""
        found = await self.client.items(f"{CORE}/events")
        return [each["message"] for each in found if each["reason"] == reason]

    # --- clients

    def targets(self, service: str) -> list[str]:
        """Where the client Service would lead now."""
        return self.kubelet.addresses(service, "clients")

    async def ask(self, service: str, num_prompt_tokens: int = 40, max_tokens: int = 24) -> None:
        """One request by whichever router the Service leads to; its answer is checked."""
        question = Question.draw(self._random, num_prompt_tokens, max_tokens)
        targets = await self.until("a ready router", self._targets_of(service))
        async with AsyncClient(targets) as client:
            await ask(client, question)

    def _targets_of(self, service: str) -> Callable[[], Any]:
        async def look() -> list[str]:
            return self.targets(service)

        return look

    def stop_asking(self) -> None:
        """No client of `load` begins another request."""
        self._ending.set()

    @contextlib.asynccontextmanager
    async def load(self, service: str, num_clients: int = 3) -> AsyncIterator[list[int]]:
        """Clients that ask without a pause for the time of the block; every answer must be whole and right.

        Yields a list that holds the number of answers so far.
        """
        count = [0]
        self._ending = ending = asyncio.Event()

        async def ask_on() -> None:
            while not ending.is_set():
                await self.ask(service, 200, 120)
                count[0] += 1

        async with asyncio.TaskGroup() as tasks:
            for _ in range(num_clients):
                tasks.create_task(ask_on())
            try:
                yield count
            finally:
                ending.set()


@contextlib.asynccontextmanager
async def running_world(folder: Path, *, watch_cache: bool = True) -> AsyncIterator[World]:
    """A control plane, a node, our kinds, and an account that has the operator's roles; no operator runs yet."""
    async with (
        ControlPlane(folder / "plane", watch_cache=watch_cache) as plane,
        KubeClient(plane.connection()) as client,
    ):
        await _create_kinds(client)
        token = await _create_account(client)
        async with running_kubelet(client, folder / "node") as kubelet:
            world = World(plane, client, kubelet, token, folder)
            try:
                yield world
            finally:
                for operator in world.operators:
                    await operator.kill()


async def _create_kinds(client: KubeClient) -> None:
    crds = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    for file in sorted((OPERATOR_CHART / "crds").glob("*.yaml")):
        crd = yaml.safe_load(file.read_text())
        await client.ask("POST", crds, crd)

        async def is_served(crd: Object = crd) -> bool:
            return (
                await client.get(f"/apis/pdserve.dev/v1alpha1/{crd['spec']['names']['plural']}") is not None
            )

        await until("the kind is served", is_served)


async def _create_account(client: KubeClient) -> str:
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}
    await client.ask("POST", "/api/v1/namespaces", namespace)
    values = {"watchNamespace": NAMESPACE}
    for each in render(values, chart=OPERATOR_CHART, release="pdserve-operator", namespace=NAMESPACE):
        if each["kind"] in _RIGHTS:
            await client.ask("POST", f"{_RIGHTS[each['kind']]}/{each['kind'].lower()}s", each)
    request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"audiences": []}}
    answer = await client.ask("POST", f"{CORE}/serviceaccounts/pdserve-operator/token", request)
    return str(answer["status"]["token"])
