"""Asking the routers of a service what they know of its workers."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import structlog

from deploy.k8s.operator.manifests import Manifest, ServiceOwner, role_of
from deploy.k8s.operator.pods import WORKERS_PORT
from deploy.k8s.operator.secrets import Objects
from deploy.k8s.operator.spec import ServiceSpec
from pdserve.errors import PdserveError
from pdserve.operator_client import OperatorClient
from pdserve.service.address import join_address
from pdserve.service.tls import ClientTls
from pdserve.status import ClusterStatus

_LIMIT_S = 3.0

log = structlog.get_logger()


class AskRouters(Protocol):
    """Whoever knows the routers."""

    async def __call__(
        self, owner: ServiceOwner, spec: ServiceSpec, pods: Sequence[Manifest]
    ) -> list[ClusterStatus | None]:
        """What each router among the pods of a set says now; None for one that doesn't answer in time."""
        ...


def pod_ip(pod: Manifest) -> str:
    """Where a pod is reached; "" = nowhere yet."""
    return str(pod.get("status", {}).get("podIP", ""))


class RouterPods:
    """By their pods' addresses, with the cluster secret. One event loop.

    ip_of  a pod's address, "" = none
    """

    def __init__(self, api: Objects, ip_of: Callable[[Manifest], str] = pod_ip) -> None:
        self._api = api
        self._ip_of = ip_of

    async def __call__(
        self, owner: ServiceOwner, spec: ServiceSpec, pods: Sequence[Manifest]
    ) -> list[ClusterStatus | None]:
        addresses = [
            join_address(ip, WORKERS_PORT)
            for pod in pods
            if role_of(pod) == "router"
            and not pod["metadata"].get("deletionTimestamp")
            and (ip := self._ip_of(pod))
        ]
        secret = (await self._read(owner.namespace, owner.secret_name(spec))).get("secret")
        if secret is None:  # which is in the service's status
            return [None for _ in addresses]
        tls_files = await self._read(owner.namespace, spec.tls_secret) if spec.tls_secret else {}
        server_name = spec.config.tls.server_name or owner.workers_host(spec.set_id)
        with _as_files(tls_files) as folder:
            tls = _tls(folder, server_name) if tls_files else None
            return list(await asyncio.gather(*(_ask_one(each, secret.strip(), tls) for each in addresses)))

    async def _read(self, namespace: str, name: str) -> dict[str, bytes]:
        found = await self._api.get("v1", "Secret", namespace, name)
        return {key: base64.b64decode(text) for key, text in ((found or {}).get("data") or {}).items()}


async def _ask_one(address: str, secret: bytes, tls: ClientTls | None) -> ClusterStatus | None:
    try:
        async with asyncio.timeout(_LIMIT_S), OperatorClient(address, secret=secret, tls=tls) as client:
            return await client.status()
    except (PdserveError, TimeoutError) as error:
        log.info("router.silent", address=address, error=str(error) or "no answer in time")
        return None


@contextlib.contextmanager
def _as_files(contents: dict[str, bytes]) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        for name, content in contents.items():
            (folder / name).write_bytes(content)
        yield folder


def _tls(folder: Path, server_name: str) -> ClientTls:
    return ClientTls(
        ca=str(folder / "ca.crt"),
        cert=str(folder / "tls.crt"),
        key=str(folder / "tls.key"),
        server_name=server_name,
    )
