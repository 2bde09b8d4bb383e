"""One container of a pod as a child process on loopback: what it is given stands in for namespaces, mounts and DNS.

A pod has an address of its own in 127.0.0.0/8, so all pods use the ports that their manifests name; the API server,
which allows no such address in Endpoints, is told the same one in 10.0.0.0/8. `0.0.0.0` in an argument becomes the
pod's address, as it would be in its network namespace; paths of mounts become folders; the names of Services that
workers dial become files with their addresses.
"""

from __future__ import annotations

import asyncio
import base64
import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from deploy.command import PROGRAM
from deploy.local.child import Child
from deploy.local.plan import ProcessSpec
from pdserve.wire_version import WIRE_VERSION
from tests.support.kube.client import KubeClient, Object

_SERVICE = re.compile(r"=([a-z0-9-]+)\.([a-z0-9-]+)\.svc:(\d+)$")
_FAKE = {"PDSERVE_ENGINE__KIND": "fake"}
# Images of the first version speak the wire's previous minor, so that an upgrade mixes both.
_FIRST = {"PDSERVE_CLUSTER__WIRE_MINOR": str(WIRE_VERSION[1] - 1)}


def announced(ip: str) -> str:
    """What the API server is told of a pod's address."""
    return f"10.{ip.removeprefix('127.')}"


def reached(ip: str) -> str:
    """Where a pod is, of whose address the API server was told."""
    return f"127.{ip.removeprefix('10.')}"


class PodProcess:
    """Its container's process, and those after it."""

    def __init__(self, pod: Object, ip: str, folder: Path, names: Path) -> None:
        self.pod = pod
        self.ip = ip
        self._folder = folder
        self._names = names
        self._child: Child | None = None
        self.num_restarts = 0
        self.log = folder / "log"

    @property
    def container(self) -> Object:
        return dict(self.pod["spec"]["containers"][0])

    @property
    def pid(self) -> int:
        assert self._child is not None
        return self._child.pid

    @property
    def has_started(self) -> bool:
        """Whether there is, or was, anything to tell."""
        return self._child is not None

    async def run(self, client: KubeClient, on_start: Callable[[], None]) -> int:
        """Start it and wait for its end; the exit code."""
        mounts = await self._mount(client)
        command = (*PROGRAM, *(self._argument(text, mounts) for text in self.container["args"]))
        version = _FIRST if self.container["image"].endswith(":1") else {}
        environ = {**os.environ, **_FAKE, **version, **self._environ(), "PYTHONUNBUFFERED": "1"}
        spec = ProcessSpec(role="", id="", command=command, metrics="", environ=environ)
        with self.log.open("a") as log:
            self._child = await Child.start(spec)
            on_start()
            output = asyncio.ensure_future(
                self._child.pass_on_output(lambda line: print(line, file=log, flush=True))
            )
            code = await self._child.wait()
            self._child.kill_rest()
            await output
        return code

    async def terminate(self) -> None:
        """What the pod wants before it is asked to end, then SIGTERM."""
        hook = self.container.get("lifecycle", {}).get("preStop")
        if hook is not None:
            program, *arguments = hook["exec"]["command"]
            assert program == "python3"
            process = await asyncio.create_subprocess_exec(sys.executable, *arguments)
            await process.wait()
        if self._child is not None:
            self._child.terminate()

    def kill(self) -> None:
        """SIGKILL."""
        if self._child is not None:
            self._child.kill()

    async def _mount(self, client: KubeClient) -> dict[str, str]:
        namespace = self.pod["metadata"]["namespace"]
        sources = {each["name"]: each for each in self.pod["spec"].get("volumes", ())}
        found = {}
        for mount in self.container.get("volumeMounts", ()):
            source, files = sources[mount["name"]], None
            if "configMap" in source:
                name = source["configMap"]["name"]
                files = (await client.ask("GET", f"/api/v1/namespaces/{namespace}/configmaps/{name}"))["data"]
            elif "secret" in source:
                name = source["secret"]["secretName"]
                secret = await client.ask("GET", f"/api/v1/namespaces/{namespace}/secrets/{name}")
                files = {key: base64.b64decode(text).decode() for key, text in secret["data"].items()}
            if files is not None:
                found[mount["mountPath"]] = (str(self._folder / mount["name"]), files)
        mounts = {path: folder for path, (folder, _) in found.items()}
        for folder, files in found.values():
            Path(folder).mkdir(parents=True, exist_ok=True)
            for name, text in files.items():
                (Path(folder) / name).write_text(_replaced(text, mounts))
        return mounts

    def _argument(self, text: str, mounts: Mapping[str, str]) -> str:
        for name, value in self._environ().items():
            text = text.replace(f"$({name})", value)
        text = _replaced(text.replace("0.0.0.0", self.ip), mounts)
        return _SERVICE.sub(lambda found: f"=file://{self._names / '.'.join(found.groups())}", text)

    def _environ(self) -> dict[str, str]:
        fields = {"metadata.name": self.pod["metadata"]["name"], "status.podIP": self.ip}
        return {
            each["name"]: each["value"]
            if "value" in each
            else fields[each["valueFrom"]["fieldRef"]["fieldPath"]]
            for each in self.container.get("env", ())
        }


def _replaced(text: str, mounts: Mapping[str, str]) -> str:
    for path, folder in mounts.items():
        text = text.replace(path, folder)
    return text
