"""The objects that a DisaggregatedService consists of. Pure: a spec in, manifests out."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deploy.k8s.operator.pods import CLIENTS_PORT, HTTP_PORT, METRICS_PORT, WORKERS_PORT, pod_spec
from deploy.k8s.operator.spec import GROUP, VERSION, WORKER_ROLES, ServiceSpec, short_hash
from deploy.toml_text import toml_of

Manifest = dict[str, Any]

MANAGER = "pdserve-operator"
INSTANCE = "app.kubernetes.io/instance"
COMPONENT = "app.kubernetes.io/component"
MANAGED_BY = "app.kubernetes.io/managed-by"
SET = f"{GROUP}/set"
TEMPLATE = f"{GROUP}/template"
ROLES = (*WORKER_ROLES, "router")
"""In the order of an upgrade: those that take KV, those that offer it, those that ask for both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceOwner:
    """The DisaggregatedService to which everything belongs."""

    name: str
    namespace: str
    uid: str

    @property
    def reference(self) -> Manifest:
        return _reference("DisaggregatedService", self.name, self.uid)

    def labels(self, **more: str) -> dict[str, str]:
        """What all of its objects carry."""
        return {"app.kubernetes.io/name": "pdserve", INSTANCE: self.name, MANAGED_BY: MANAGER, **more}

    @property
    def selector(self) -> str:
        """Of all its objects."""
        return f"{INSTANCE}={self.name},{MANAGED_BY}={MANAGER}"

    def secret_name(self, spec: ServiceSpec) -> str:
        """Of the Secret with the cluster secret."""
        return spec.secret_name or f"{self.name}-cluster"

    def workers_host(self, set_id: str) -> str:
        """The name that stands for all routers of a set, for workers."""
        return f"{self.named('workers', set_id)}.{self.namespace}.svc"

    def named(self, what: str, set_id: str) -> str:
        """Of an object of one set."""
        return f"{self.name}-{what}-{set_id}"


def cluster_secret(owner: ServiceOwner, secret: bytes) -> Manifest:
    """Made once: another secret would keep old and new pods apart."""
    made = _object("v1", "Secret", f"{owner.name}-cluster", owner)
    return {**made, "type": "Opaque", "data": {"secret": base64.b64encode(secret).decode()}}


def config_map(owner: ServiceOwner, spec: ServiceSpec) -> Manifest:
    """Named by its content: pods that start again during an upgrade find what they started with."""
    tables: dict[str, dict[str, object]] = {}
    for name, value in spec.settings.items():
        table, _, key = name.partition(".")
        tables.setdefault(table, {})[key] = value
    text = toml_of(tables)
    made = _object("v1", "ConfigMap", owner.named("config", short_hash(text)), owner)
    return {**made, "data": {"pdserve.toml": text}}


def client_service(owner: ServiceOwner, spec: ServiceSpec, set_id: str) -> Manifest:
    """Where clients reach the routers of the set that serves."""
    made = _object("v1", "Service", owner.name, owner, component="router")
    ports = [_port("clients", CLIENTS_PORT), *([_port("http", HTTP_PORT)] if spec.serves_http else [])]
    return {**made, "spec": {"selector": _selected(owner, "router", set_id), "ports": ports}}


def workers_service(owner: ServiceOwner, set_id: str) -> Manifest:
    """Where workers find every router of their set.

    Unready ones too: a router has no tokenizer, and isn't ready, until a worker has joined.
    """
    made = _object("v1", "Service", owner.named("workers", set_id), owner, component="router", set_id=set_id)
    return {
        **made,
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": _selected(owner, "router", set_id),
            "ports": [_port("workers", WORKERS_PORT), _port("metrics", METRICS_PORT)],
        },
    }


def deployment(owner: ServiceOwner, spec: ServiceSpec, role: str, pool: Manifest | None = None) -> Manifest:
    """The pods of one role; without `replicas`, which are changed by the scale subresource alone.

    pool  the WorkerPool that owns it; None: the service does
    """
    set_id = spec.set_id
    name = owner.named(role, set_id)
    labels = owner.labels(**{COMPONENT: role, SET: set_id})
    template = {
        "metadata": {"labels": labels},
        "spec": pod_spec(
            role,
            spec,
            config_map=config_map(owner, spec)["metadata"]["name"],
            secret=owner.secret_name(spec),
            routers=owner.workers_host(set_id),
        ),
    }
    made = _object("apps/v1", "Deployment", name, owner, component=role, set_id=set_id)
    made["metadata"]["annotations"] = {TEMPLATE: short_hash(template)}
    if pool is not None:
        uid = pool["metadata"]["uid"]
        made["metadata"]["ownerReferences"] = [_reference("WorkerPool", pool["metadata"]["name"], uid)]
    return {
        **made,
        "spec": {
            "selector": {"matchLabels": _selected(owner, role, set_id)},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
            "progressDeadlineSeconds": spec.progress_s,
            "revisionHistoryLimit": 2,
            "template": template,
        },
    }


def worker_pool(owner: ServiceOwner, spec: ServiceSpec, role: str, replicas: int | None) -> Manifest:
    """replicas  None: whoever uses the scale subresource, or the scaling core, has set them"""
    set_id = spec.set_id
    pool = spec.pools[role]
    scaled_by = "Service" if pool.is_fixed else "Targets" if spec.is_scaled else "Scale"
    made = _object(
        f"{GROUP}/{VERSION}",
        "WorkerPool",
        owner.named(role, set_id),
        owner,
        component=role,
        set_id=set_id,
    )
    wanted = {} if replicas is None else {"replicas": replicas}
    return {**made, "spec": {"service": owner.name, "role": role, "scaledBy": scaled_by, **wanted}}


def disruption_budget(owner: ServiceOwner, set_id: str, role: str) -> Manifest:
    """One pod at a time may be evicted."""
    name = owner.named(role, set_id)
    made = _object("policy/v1", "PodDisruptionBudget", name, owner, component=role, set_id=set_id)
    return {
        **made,
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": _selected(owner, role, set_id)}},
    }


def set_of(manifest: Mapping[str, Any]) -> str:
    """The set to which an object belongs; "" = to none."""
    return str((manifest["metadata"].get("labels") or {}).get(SET, ""))


def role_of(manifest: Mapping[str, Any]) -> str:
    """router, prefill or decode; "" = none."""
    return str((manifest["metadata"].get("labels") or {}).get(COMPONENT, ""))


def covers(seen: Any, wanted: Any) -> bool:
    """Whether an object has everything that a manifest says; it may have more."""
    if isinstance(wanted, dict):
        return isinstance(seen, dict) and all(
            key in seen and covers(seen[key], value) for key, value in wanted.items()
        )
    if isinstance(wanted, list):
        return isinstance(seen, list) and len(seen) == len(wanted) and all(map(covers, seen, wanted))
    return bool(seen == wanted)


def _object(
    api: str, kind: str, name: str, owner: ServiceOwner, *, component: str = "", set_id: str = ""
) -> Manifest:
    more = {COMPONENT: component} if component else {}
    if set_id:
        more[SET] = set_id
    return {
        "apiVersion": api,
        "kind": kind,
        "metadata": {
            "name": name,
            "namespace": owner.namespace,
            "labels": owner.labels(**more),
            "ownerReferences": [owner.reference],
        },
    }


def _reference(kind: str, name: str, uid: str) -> Manifest:
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": kind,
        "name": name,
        "uid": uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }


def _selected(owner: ServiceOwner, role: str, set_id: str) -> dict[str, str]:
    return {INSTANCE: owner.name, COMPONENT: role, SET: set_id}


def _port(name: str, port: int) -> Manifest:
    return {"name": name, "port": port, "targetPort": name, "protocol": "TCP"}
