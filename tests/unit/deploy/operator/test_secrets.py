"""Secrets that a service names and that aren't there, or lack something: told, and no reason to stop."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from deploy.k8s.operator.manifests import INSTANCE, Manifest
from deploy.k8s.operator.routers import RouterPods
from deploy.k8s.operator.secrets import trouble_of_secrets
from tests.unit.deploy.operator.services import OWNER, spec

ACCESS = {"access": {"keysSecret": "keys", "tlsSecret": "tls"}}
WHOLE = {
    "mine": ("secret",),
    "keys": ("keys.toml",),
    "tls": ("tls.crt", "tls.key", "ca.crt"),
    "one-cluster": ("secret",),
}


class Secrets:
    """By name, which keys each has."""

    def __init__(self, found: dict[str, tuple[str, ...]]) -> None:
        self._found = found

    async def get(self, api: str, kind: str, namespace: str, name: str) -> Manifest | None:
        assert (api, kind, namespace) == ("v1", "Secret", "ns")
        if name not in self._found:
            return None
        text = base64.b64encode(b"x").decode()
        return {"data": dict.fromkeys(self._found[name], text)} if self._found[name] else {}


@pytest.mark.parametrize(
    ("found", "given", "said"),
    [
        (WHOLE, {}, None),
        (WHOLE, {"secretName": "mine", **ACCESS}, None),
        (WHOLE, {"secretName": "other"}, "spec.secretName: there is no Secret other in ns"),
        (WHOLE | {"mine": ()}, {"secretName": "mine"}, "spec.secretName: the Secret mine has no secret"),
        (WHOLE | {"keys": ("x",)}, ACCESS, "spec.access.keysSecret: the Secret keys has no keys.toml"),
        (
            WHOLE | {"tls": ("tls.crt",)},
            ACCESS,
            "spec.access.tlsSecret: the Secret tls has no tls.key, ca.crt",
        ),
    ],
)
async def test_what_is_missing_is_named(
    found: dict[str, tuple[str, ...]], given: dict[str, Any], said: str | None
) -> None:
    trouble = await trouble_of_secrets(Secrets(found), OWNER, spec(**given))
    assert (trouble and trouble.message) == said


@pytest.mark.parametrize("found", [{}, {"one-cluster": ()}])
async def test_without_the_secret_no_router_is_asked(found: dict[str, tuple[str, ...]]) -> None:
    pod = {
        "metadata": {"name": "r", "labels": {INSTANCE: "one", "app.kubernetes.io/component": "router"}},
        "status": {"podIP": "127.0.0.1"},
    }
    ask = RouterPods(Secrets(found))
    assert await ask(OWNER, spec(), [pod]) == [None]
