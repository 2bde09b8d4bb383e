"""A stand-in for the kubelet: binds pods to itself, runs them as processes, and says how they are.

It also stands in for DNS: a file for each Service and port, with the addresses of its Endpoints.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from random import Random
from typing import Any

import aiohttp

from deploy.local.probe import fetch
from tests.support.kube.client import KubeClient, Object, Refused
from tests.support.kube.pod_process import PodProcess, announced, reached

NODE = "test-node"
_RETRY_S = 0.2
_PROBE_S = 0.1
_BACK_OFF_S = 0.5


class Kubelet:
    """One event loop; `async with running_kubelet(client, folder) as kubelet: …`.

    refuse  says of an image why it can't be pulled; "" = it can
    """

    def __init__(self, client: KubeClient, folder: Path) -> None:
        self._client = client
        self._folder = folder
        self._names = folder / "names"
        self._names.mkdir(parents=True)
        random = Random(os.getpid())
        self._network = f"127.{random.randrange(16, 250)}.{random.randrange(250)}"
        self._num_pods = 0
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._ending: dict[str, asyncio.Task[None]] = {}
        self.pods: dict[str, PodProcess] = {}
        self.endpoints: dict[str, Object] = {}
        self.unpullable: set[str] = set()
        self.failures: list[BaseException] = []

    def addresses(self, service: str, port: str) -> list[str]:
        """HOST:PORT of the ready pods behind a Service."""
        return [
            f"{reached(address['ip'])}:{each['port']}"
            for subset in self.endpoints.get(service, {}).get("subsets") or ()
            for each in subset.get("ports", ())
            if each.get("name") == port
            for address in subset.get("addresses") or ()
        ]

    def of_role(self, role: str) -> list[PodProcess]:
        """Running pods, by name."""
        found = [pod for _, pod in sorted(self.pods.items())]
        return [pod for pod in found if pod.container["name"] == role]

    async def follow_pods(self) -> None:
        async for event, pod in self._follow("/api/v1/pods"):
            name = pod["metadata"]["name"]
            if event == "DELETED":
                if name in self.pods:  # deleted with no grace by somebody else
                    self.pods[name].kill()
            elif not pod["spec"].get("nodeName"):
                await self._bind(pod)
            elif name not in self._tasks:
                self._tasks[name] = asyncio.ensure_future(self._guarded(name, self._run(pod)))
            elif pod["metadata"].get("deletionTimestamp") and name in self.pods:
                self.pods[name].pod = pod
                self._end(self.pods[name])

    def _end(self, process: PodProcess) -> None:
        name = process.pod["metadata"]["name"]
        if process.has_started and name not in self._ending:  # else it is told as soon as it has
            self._ending[name] = asyncio.ensure_future(process.terminate())

    async def follow_endpoints(self) -> None:
        async for event, found in self._follow("/api/v1/endpoints"):
            name, namespace = found["metadata"]["name"], found["metadata"]["namespace"]
            self.endpoints[name] = {} if event == "DELETED" else found
            for subset in found.get("subsets") or ():
                for port in subset.get("ports", ()):
                    addresses = sorted(reached(address["ip"]) for address in subset.get("addresses") or ())
                    file = self._names / f"{name}.{namespace}.{port['port']}"
                    scratch = file.with_suffix(".new")
                    scratch.write_text("".join(f"{ip}:{port['port']}\n" for ip in addresses))
                    scratch.replace(file)

    async def _follow(self, path: str) -> AsyncIterator[tuple[str, Object]]:
        while True:
            with contextlib.suppress(aiohttp.ClientError, Refused, ConnectionError):
                async for event in self._client.watch(path):
                    yield event
            await asyncio.sleep(_RETRY_S)  # the server ended the watch, or has gone for a while

    async def _bind(self, pod: Object) -> None:
        metadata = pod["metadata"]
        path = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}/binding"
        body = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {"name": metadata["name"]},
            "target": {"apiVersion": "v1", "kind": "Node", "name": NODE},
        }
        with contextlib.suppress(Refused):  # bound or gone by now
            await self._client.ask("POST", path, body)

    async def _guarded(self, name: str, run: Coroutine[Any, Any, None]) -> None:
        try:
            await run
        except Exception as error:  # the outermost frame of a pod: the test is told
            self.failures.append(error)
            raise
        finally:
            self.pods.pop(name, None)
            self._tasks.pop(name, None)

    async def _run(self, pod: Object) -> None:
        name = pod["metadata"]["name"]
        self._num_pods += 1
        folder = self._folder / "pods" / name
        folder.mkdir(parents=True)
        process = PodProcess(pod, f"{self._network}.{self._num_pods}", folder, self._names)
        self.pods[name] = process
        gone = False
        while not gone:
            image = process.container["image"]
            if image in self.unpullable:
                waiting = {"reason": "ImagePullBackOff", "message": f"no such image: {image}"}
                gone = await self._tell(process, ready=False, state={"waiting": waiting})
                await asyncio.sleep(_BACK_OFF_S)
            else:
                code = await self._run_once(process)
                ended = {
                    "terminated": {
                        "exitCode": code if code >= 0 else 128 - code,
                        "message": _last_line(process),
                    }
                }
                if not process.pod["metadata"].get("deletionTimestamp"):
                    process.num_restarts += 1
                    waiting = {"reason": "CrashLoopBackOff", "message": "back-off of the test's kubelet"}
                    gone = await self._tell(process, ready=False, state={"waiting": waiting}, last=ended)
                    await asyncio.sleep(_BACK_OFF_S)
            if process.pod["metadata"].get("deletionTimestamp"):
                break
        if not gone:
            options = {"gracePeriodSeconds": 0, "preconditions": {"uid": pod["metadata"]["uid"]}}
            with contextlib.suppress(Refused):  # somebody else has
                await self._retried(lambda: self._client.ask("DELETE", _path(process.pod), options))

    async def _run_once(self, process: PodProcess) -> int:
        started = asyncio.Event()

        def on_start() -> None:
            started.set()
            if process.pod["metadata"].get("deletionTimestamp"):  # before there was anything to tell
                self._end(process)

        running = asyncio.ensure_future(process.run(self._client, on_start))
        probing = asyncio.ensure_future(self._probe(process, started))
        killing = asyncio.ensure_future(self._enforce_grace(process))
        try:
            return await running
        finally:
            probing.cancel()
            killing.cancel()

    async def _enforce_grace(self, process: PodProcess) -> None:
        while not process.pod["metadata"].get("deletionTimestamp"):
            await asyncio.sleep(_PROBE_S)
        await asyncio.sleep(process.pod["metadata"].get("deletionGracePeriodSeconds", 30))
        self.failures.append(
            AssertionError(f"{process.container['name']} didn't end within its grace period")
        )
        process.kill()

    async def _probe(self, process: PodProcess, started: asyncio.Event) -> None:
        await started.wait()
        told: bool | None = None
        port = next(each["containerPort"] for each in process.container["ports"] if each["name"] == "metrics")
        path = process.container["readinessProbe"]["httpGet"]["path"]
        while True:
            answer = await fetch(f"{process.ip}:{port}", path)
            ready = answer is not None and answer[0] == 200
            if ready != told:
                await self._tell(process, ready=ready, state={"running": {}})
                told = ready
            await asyncio.sleep(_PROBE_S)

    async def _tell(
        self, process: PodProcess, *, ready: bool, state: Object, last: Object | None = None
    ) -> bool:
        """Write the pod's status; True: there is no such pod any more."""
        text = "True" if ready else "False"
        container = {
            "name": process.container["name"],
            "image": process.container["image"],
            "imageID": "",
            "ready": ready,
            "restartCount": process.num_restarts,
            "state": state,
            "lastState": last or {},
        }
        status = {
            "phase": "Running",
            "podIP": announced(process.ip),
            "podIPs": [{"ip": announced(process.ip)}],
            "conditions": [{"type": kind, "status": text} for kind in ("Ready", "ContainersReady")],
            "containerStatuses": [container],
        }
        try:
            await self._retried(
                lambda: self._client.patch(f"{_path(process.pod)}/status", {"status": status})
            )
        except Refused as error:
            if error.status != 404:
                raise
            return True
        return False

    async def _retried(self, ask: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        while True:
            try:
                await ask()
                return
            except (aiohttp.ClientError, ConnectionError):  # the API server is away
                await asyncio.sleep(_RETRY_S)

    async def close(self) -> None:
        """End all pods at once."""
        tasks = [*self._tasks.values(), *self._ending.values()]
        for each in tasks:
            each.cancel()
        for process in list(self.pods.values()):
            process.kill()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def running_kubelet(client: KubeClient, folder: Path) -> AsyncIterator[Kubelet]:
    """A node and its kubelet; all pods end with the block. Raises what went wrong in one of them."""
    node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE}}
    await client.ask("POST", "/api/v1/nodes", node)
    kubelet = Kubelet(client, folder)
    following = [
        asyncio.ensure_future(kubelet.follow_pods()),
        asyncio.ensure_future(kubelet.follow_endpoints()),
    ]
    try:
        yield kubelet
    finally:
        for each in following:
            each.cancel()
        await asyncio.gather(*following, return_exceptions=True)
        await kubelet.close()
    failures = [each.exception() for each in following if not each.cancelled()]
    for failure in (*kubelet.failures, *failures):
        if failure is not None:
            raise failure


def _path(pod: Object) -> str:
    return f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{pod['metadata']['name']}"


def _last_line(process: PodProcess) -> str:
    lines = process.log.read_text().splitlines()
    return next((line for line in reversed(lines) if line.strip()), "")
