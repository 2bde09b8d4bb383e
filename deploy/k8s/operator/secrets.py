"""The Secrets that a service names: whether they are there, and have what its pods read from them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from deploy.k8s.operator.manifests import Manifest, ServiceOwner
from deploy.k8s.operator.spec import ServiceSpec
from deploy.k8s.operator.status import Trouble


class Objects(Protocol):
    """Where they are. Raises what Api raises."""

    async def get(self, api: str, kind: str, namespace: str, name: str) -> Manifest | None:
        """None = there is none."""
        ...


async def trouble_of_secrets(api: Objects, owner: ServiceOwner, spec: ServiceSpec) -> Trouble | None:
    """The first that is missing: pods would wait for it, saying so in events only."""
    for place, name, keys in _named(owner, spec):
        secret = await api.get("v1", "Secret", owner.namespace, name)
        if secret is None:
            return Trouble("SecretMissing", f"{place}: there is no Secret {name} in {owner.namespace}")
        if lacks := [key for key in keys if key not in (secret.get("data") or {})]:
            return Trouble("SecretMissing", f"{place}: the Secret {name} has no {', '.join(lacks)}")
    return None


def _named(owner: ServiceOwner, spec: ServiceSpec) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Where it is named, its name, and its keys."""
    yield "spec.secretName", owner.secret_name(spec), ("secret",)
    if spec.keys_secret:
        yield "spec.access.keysSecret", spec.keys_secret, ("keys.toml",)
    if spec.tls_secret:
        yield "spec.access.tlsSecret", spec.tls_secret, ("tls.crt", "tls.key", "ca.crt")
