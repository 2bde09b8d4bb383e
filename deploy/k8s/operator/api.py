"""What the operator asks of the API server: a few verbs on the few kinds of objects that it has to do with.

kopf watches; this reads and writes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

import aiohttp
import kopf

from deploy.k8s.operator.manifests import MANAGER, Manifest
from deploy.k8s.operator.spec import GROUP, VERSION

_OURS = f"{GROUP}/{VERSION}"
_PLURALS = {
    ("v1", "ConfigMap"): "configmaps",
    ("v1", "Pod"): "pods",
    ("v1", "Secret"): "secrets",
    ("v1", "Service"): "services",
    ("apps/v1", "Deployment"): "deployments",
    ("policy/v1", "PodDisruptionBudget"): "poddisruptionbudgets",
    ("coordination.k8s.io/v1", "Lease"): "leases",
    (_OURS, "DisaggregatedService"): "disaggregatedservices",
    (_OURS, "WorkerPool"): "workerpools",
}
_MERGE = "application/merge-patch+json"
_APPLY = "application/apply-patch+yaml"
_LIMIT = aiohttp.ClientTimeout(total=30)


class ApiError(Exception):
    """The API server's answer to what it didn't do; 409 = somebody else was faster."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status


class Api:
    """One event loop; any number of calls at once. `async with Api(connection) as api: …`

    connect  where the server is and who we are; asked again when that no longer counts: tokens of pods are short-lived
    Every method raises ApiError, and aiohttp.ClientError or TimeoutError where the server can't be reached.
    """

    def __init__(self, connect: Callable[[], kopf.ConnectionInfo]) -> None:
        self._connect = connect
        self._connection = connect()
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        is_plain = self._connection.server.startswith("http://")
        ssl = True if is_plain else self._connection.as_ssl_context()
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=ssl), timeout=_LIMIT)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._session is not None
        await self._session.close()

    async def get(self, api: str, kind: str, namespace: str, name: str) -> Manifest | None:
        """One object; None = there is none."""
        try:
            found: Manifest = await self._ask("GET", _path(api, kind, namespace, name))
            return found
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    async def listed(self, api: str, kind: str, namespace: str, selector: str) -> list[Manifest]:
        """The objects whose labels fit."""
        answer = await self._ask("GET", _path(api, kind, namespace), params={"labelSelector": selector})
        # The items of a list don't say what they are.
        return [{"apiVersion": api, "kind": kind, **item} for item in answer["items"]]

    async def has(self, api: str, kind: str) -> bool:
        """Whether the server knows the kind."""
        try:
            found = await self._ask("GET", f"/apis/{api}")
        except ApiError as error:
            if error.status == 404:
                return False
            raise
        return any(each["kind"] == kind for each in found["resources"])

    async def apply(self, manifest: Manifest) -> Manifest:
        """Make it, or make it so again: fields that others have changed come back to what the manifest says."""
        params = {"fieldManager": MANAGER, "force": "true"}
        applied: Manifest = await self._ask(
            "PATCH", _path_of(manifest), manifest, content_type=_APPLY, params=params
        )
        return applied

    async def create(self, manifest: Manifest) -> Manifest:
        """Raises ApiError 409 if it exists."""
        metadata = manifest["metadata"]
        path = _path(manifest["apiVersion"], manifest["kind"], metadata["namespace"])
        made: Manifest = await self._ask("POST", path, manifest, params={"fieldManager": MANAGER})
        return made

    async def replace(self, manifest: Manifest) -> Manifest:
        """Raises ApiError 409 if it has changed since it was read."""
        params = {"fieldManager": MANAGER}
        replaced: Manifest = await self._ask("PUT", _path_of(manifest), manifest, params=params)
        return replaced

    async def scale(self, manifest: Manifest, replicas: int) -> None:
        """Change the number of replicas, and nothing else."""
        await self._merge(manifest, "/scale", {"spec": {"replicas": replicas}})

    async def set_status(self, manifest: Manifest, status: Mapping[str, Any]) -> None:
        """Replace fields of the status; lists as a whole."""
        await self._merge(manifest, "/status", {"status": status})

    async def annotate(self, manifest: Manifest, annotations: Mapping[str, str]) -> None:
        """Set annotations; others stay."""
        await self._merge(manifest, "", {"metadata": {"annotations": annotations}})

    async def delete(self, manifest: Manifest) -> None:
        """Delete it and, in the background, what it owns; no error if it is gone, or another has its name by now."""
        body = {"propagationPolicy": "Background", "preconditions": {"uid": manifest["metadata"]["uid"]}}
        try:
            await self._ask("DELETE", _path_of(manifest), body)
        except ApiError as error:
            if error.status not in (404, 409):
                raise

    async def _merge(self, manifest: Manifest, subresource: str, body: Mapping[str, Any]) -> None:
        await self._ask(
            "PATCH",
            _path_of(manifest) + subresource,
            body,
            content_type=_MERGE,
            params={"fieldManager": MANAGER},
        )

    async def _ask(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        content_type: str = "application/json",
        params: Mapping[str, str] | None = None,
    ) -> Any:
        try:
            return await self._ask_once(method, path, body, content_type, params)
        except ApiError as error:
            if error.status != 401:
                raise
        self._connection = self._connect()
        return await self._ask_once(method, path, body, content_type, params)

    async def _ask_once(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        content_type: str,
        params: Mapping[str, str] | None,
    ) -> Any:
        assert self._session is not None, "outside of `async with`"
        headers = dict(self._connection.as_http_headers())
        if body is not None:
            headers["Content-Type"] = content_type
        url = self._connection.server.rstrip("/") + path
        async with self._session.request(method, url, json=body, params=params, headers=headers) as answer:
            if answer.status >= 400:
                text = await answer.text()
                try:
                    message = str((await answer.json(content_type=None))["message"])
                except (ValueError, KeyError, TypeError):
                    message = text[:500]
                raise ApiError(answer.status, message)
            return await answer.json()


def _path_of(manifest: Manifest) -> str:
    metadata = manifest["metadata"]
    return _path(manifest["apiVersion"], manifest["kind"], metadata["namespace"], metadata["name"])


def _path(api: str, kind: str, namespace: str, name: str = "") -> str:
    root = "/api" if api == "v1" else "/apis"
    plural = _PLURALS[api, kind]
    return f"{root}/{api}/namespaces/{namespace}/{plural}" + (f"/{name}" if name else "")
