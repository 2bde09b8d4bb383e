"""etcd, kube-apiserver and kube-controller-manager on loopback: what `make k8s-control-plane` built."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping
from pathlib import Path
from random import Random
from types import TracebackType
from typing import Self

import aiohttp
import kopf

from deploy.local.child import Child
from deploy.local.plan import ProcessSpec
from deploy.local.ports import PortReservations
from tests.support.certificates import Authority
from tests.support.kube.client import KubeClient
from tests.support.waiting import until
from tools.k8s_tools import tools_dir

BUILT = tools_dir() / "kubernetes-1.20.2"
IS_BUILT = (BUILT / "complete").exists()
# What a test needs of them; no nodes: the stand-in for the kubelet binds pods itself.
_CONTROLLERS = "deployment,replicaset,garbagecollector,namespace,endpoint,disruption"
_READY_S = 120.0


class ControlPlane:
    """One event loop. All state is in the folder; its processes end with the block, the API server before its store.

    watch_cache  whether the API server answers watches from its memory; without it what its store has compacted is gone
    """

    def __init__(self, folder: Path, *, watch_cache: bool = True) -> None:
        self._folder = folder
        self._watch_cache = watch_cache
        self._random = Random(os.getpid())
        self._children: dict[str, tuple[Child, asyncio.Task[None]]] = {}
        self._ports = PortReservations()
        self._commands: dict[str, tuple[str, ...]] = {}
        self.token = f"{self._random.getrandbits(128):032x}"
        self.server = ""

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(self._make_files)
        etcd, peer, api, manager = (self._ports.reserve("127.0.0.1", 0) for _ in range(4))
        self.server, self._store = f"https://localhost:{api}", f"http://127.0.0.1:{etcd}"
        self._commands = self._lay_out(etcd, peer, api, manager)
        try:
            for name in ("etcd", "kube-apiserver"):
                await self.start(name)
            await self.wait_ready()
            await self.start("kube-controller-manager")
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End all processes; idempotent."""
        for name in ("kube-controller-manager", "kube-apiserver", "etcd"):
            await self.stop(name)
        self._ports.close()

    async def start(self, name: str) -> None:
        """Start a part, or start it again at the same address with the same state."""
        log = (self._folder / f"{name}.log").open("a")
        environ = {**os.environ, "GOMAXPROCS": "2"}
        spec = ProcessSpec(role=name, id=name, command=self._commands[name], metrics="", environ=environ)
        child = await Child.start(spec)

        async def keep_log() -> None:
            with log:
                await child.pass_on_output(lambda line: print(line, file=log, flush=True))

        self._children[name] = (child, asyncio.ensure_future(keep_log()))

    async def stop(self, name: str) -> None:
        """End a part and wait for it; idempotent."""
        if name not in self._children:
            return
        child, logging = self._children.pop(name)
        child.terminate()
        try:
            async with asyncio.timeout(15):
                await child.wait()
        except TimeoutError:
            child.kill()
            await child.wait()
        await logging

    async def wait_ready(self) -> None:
        """Until the API server answers that it is."""

        async def ask() -> bool:
            assert not any(output.done() for _, output in self._children.values()), self.log_tail()
            async with KubeClient(self.connection()) as client:
                try:
                    return bool(await client.ask("GET", "/readyz") == "ok")
                except Exception:  # whatever a server that begins may answer, or not answer
                    return False

        await until("the API server is ready", ask, limit_s=_READY_S, told=self.log_tail)

    async def compact(self, revision: int) -> None:
        """Let the store forget what was before this revision: watches from there on are answered with 410."""
        async with aiohttp.ClientSession(self._store) as store:
            body = {"revision": str(revision), "physical": True}
            async with store.post("/v3/kv/compaction", json=body) as answer:
                assert answer.status == 200, await answer.text()

    def connection(self, token: str = "") -> kopf.ConnectionInfo:
        """As the administrator, or by a token."""
        return kopf.ConnectionInfo(
            server=self.server, ca_path=str(self._folder / "kube-ca.pem"), token=token or self.token
        )

    def kubeconfig(self, user: str, token: str, namespace: str, server: str = "") -> Path:
        """A file for programs that act as somebody, at the API server or at what stands before it."""
        path = self._folder / f"{user}.kubeconfig"
        cluster = {
            "server": server or self.server,
            "certificate-authority": str(self._folder / "kube-ca.pem"),
        }
        context = {"cluster": "test", "user": user, "namespace": namespace}
        config: Mapping[str, object] = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": user, "user": {"token": token}}],
            "contexts": [{"name": "test", "context": context}],
        }
        path.write_text(json.dumps(config))
        path.chmod(0o600)
        return path

    def log_tail(self) -> str:
        """The end of what each part said."""
        logs = sorted(self._folder.glob("*.log"))
        return "\n".join(f"--- {log.name}\n{log.read_text()[-1500:]}" for log in logs)

    def _make_files(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        authority = Authority(self._folder, "kube-ca")
        authority.sign("localhost", "server")
        authority.sign("accounts")
        (self._folder / "tokens.csv").write_text(f'{self.token},admin,1,"system:masters"\n')

    def _lay_out(self, etcd: int, peer: int, api: int, manager: int) -> dict[str, tuple[str, ...]]:
        folder, store, peers = self._folder, f"http://127.0.0.1:{etcd}", f"http://127.0.0.1:{peer}"
        admin = self.kubeconfig("admin", self.token, "default")
        return {
            "etcd": (
                str(BUILT / "etcd"),
                "--name=test",
                f"--data-dir={folder / 'etcd'}",
                f"--listen-client-urls={store}",
                f"--advertise-client-urls={store}",
                f"--listen-peer-urls={peers}",
                f"--initial-advertise-peer-urls={peers}",
                f"--initial-cluster=test={peers}",
                "--log-level=warn",
            ),
            "kube-apiserver": (
                str(BUILT / "kube-apiserver"),
                f"--etcd-servers={store}",
                "--bind-address=127.0.0.1",
                "--advertise-address=127.0.0.1",
                f"--secure-port={api}",
                f"--tls-cert-file={folder / 'server.pem'}",
                f"--tls-private-key-file={folder / 'server.key'}",
                f"--token-auth-file={folder / 'tokens.csv'}",
                "--authorization-mode=RBAC",
                "--service-account-issuer=https://kubernetes.default.svc",
                f"--service-account-key-file={folder / 'accounts.pem'}",
                f"--service-account-signing-key-file={folder / 'accounts.key'}",
                "--service-cluster-ip-range=10.0.0.0/24",
                "--disable-admission-plugins=ServiceAccount",  # its tokens for pods need one more controller
                "--enable-priority-and-fairness=false",
                f"--watch-cache={'true' if self._watch_cache else 'false'}",
            ),
            "kube-controller-manager": (
                str(BUILT / "kube-controller-manager"),
                f"--kubeconfig={admin}",
                f"--controllers={_CONTROLLERS}",
                "--leader-elect=false",
                "--bind-address=127.0.0.1",
                "--port=0",
                f"--secure-port={manager}",
                f"--cert-dir={folder / 'controller-manager'}",
            ),
        }
