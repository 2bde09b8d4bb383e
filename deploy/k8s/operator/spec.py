"""The spec of a DisaggregatedService: read, with its defaults, and checked beyond what a schema can say. Pure."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pdserve.service.config import Config, load
from pdserve.service.exposure import check_router
from pdserve.service.lifecycle import longest_drain_s
from pdserve.service.settings import ConfigError

GROUP = "pdserve.dev"
VERSION = "v1alpha1"
WORKER_ROLES = ("decode", "prefill")
SECRET_FILE = "/etc/pdserve/secret/secret"
_KEYS_FILE = "/etc/pdserve/keys/keys.toml"
_TLS_FOLDER = "/etc/pdserve/tls"

# What the operator sets itself: an address or a name in the spec's config would be one for all pods.
_OWN_SETTINGS = (
    "router.id",
    "router.listen",
    "router.workers_listen",
    "router.keys_file",
    "worker.id",
    "worker.role",
    "worker.model",
    "worker.routers",
    "worker.kv_listen",
    "worker.unix_dir",
    "cluster.secret_file",
    "cluster.insecure",
    "metrics.listen",
    "http.listen",
    "tracing.headers_file",
    "transport.kinds",
    "transport.strict",
    "timeouts.drain_s",
    "scaling.change_roles",
    "scaling.itl_target_s",
    "scaling.ttft_target_s",
    "tls.cert_file",
    "tls.key_file",
    "tls.ca_file",
)
# Clients are led to a router for a moment after it was asked to end, until every node has heard of it.
_DRAIN_DELAY_S = 5.0
# What the KV of two workers must have in common (and the routers' tokenizer): workers that differ in any of these can't
# serve in one cluster, so a change is not rolled out pod by pod.
_KV_SETTINGS = ("engine.kind", "engine.dtype", "engine.kv_dtype", "engine.block_size", "engine.long_context")


class InvalidSpec(Exception):
    """What a person must change: one line that names the field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodSettings:
    """What the pods of one component ask of their nodes."""

    resources: Mapping[str, Any] = field(default_factory=dict)
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSpec:
    """How many workers of a role; least = most: so many, and nobody else decides."""

    least: int
    most: int
    pods: PodSettings

    @property
    def is_fixed(self) -> bool:
        return self.least == self.most

    def bounded(self, replicas: int) -> int:
        """The nearest number that the spec allows."""
        return min(max(replicas, self.least), self.most)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSpec:
    """A whole spec.

    is_scaled  there are targets, which decide on the numbers of pods between min and max
    settings   "table.key" → value of what all processes are given
    config     the same, checked, with every default; and what scaling goes by
    """

    model: str
    router_image: str
    worker_image: str
    pull_policy: str
    pull_secrets: tuple[str, ...]
    model_claim: str
    num_routers: int
    serves_http: bool
    router_pods: PodSettings
    pools: Mapping[str, PoolSpec]
    is_scaled: bool
    new_set: bool
    progress_s: int
    secret_name: str
    keys_secret: str
    tls_secret: str
    ip_family: str
    settings: Mapping[str, object]
    config: Config

    @property
    def set_id(self) -> str:
        """Names what all pods of one set have in common; two sets never share a request."""
        effective = self.config.effective()
        same = [self.model, *(effective[name] for name in _KV_SETTINGS)]
        if self.new_set:
            same += [self.router_image, self.worker_image]
        return short_hash(same)

    def grace_s(self, role: str) -> int:
        """What a pod may take to end: its drain, and 9 for its last words and the start of the signal."""
        delay_s = self.config.router.drain_delay_s if role == "router" else 0.0
        return math.ceil(longest_drain_s(self.config.timeouts) + delay_s) + 9


def read_spec(spec: Mapping[str, Any]) -> ServiceSpec:
    """Raises InvalidSpec. The defaults are the CRD's, which an API server has filled in already."""
    pools_of = spec.get("pools") or {}
    access = spec.get("access") or {}
    routers = spec.get("routers") or {}
    images = spec["images"]
    upgrade = spec.get("upgrade") or {}
    pools = {role: _pool(role, pools_of.get(role) or {}) for role in WORKER_ROLES}
    settings, config = _settings(spec, pools)
    keys_secret, tls_secret = access.get("keysSecret", ""), access.get("tlsSecret", "")
    return ServiceSpec(
        model=spec["model"],
        router_image=images["router"],
        worker_image=images["worker"],
        pull_policy=images.get("pullPolicy", "IfNotPresent"),
        pull_secrets=tuple(images.get("pullSecrets", ())),
        model_claim=spec.get("modelClaim", ""),
        num_routers=routers.get("replicas", 2),
        serves_http=routers.get("http", False),
        router_pods=_pods(routers),
        pools=pools,
        is_scaled="targets" in spec,
        new_set=upgrade.get("strategy", "Auto") == "NewSet",
        progress_s=upgrade.get("progressSeconds", 600),
        secret_name=spec.get("secretName", ""),
        keys_secret=keys_secret,
        tls_secret=tls_secret,
        ip_family=spec.get("ipFamily", "IPv4"),
        settings=settings,
        config=config,
    )


def short_hash(value: object) -> str:
    """Eight hexadecimal digits, fit for names; equal for equal JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:8]


def _pool(role: str, pool: Mapping[str, Any]) -> PoolSpec:
    has_range = "min" in pool or "max" in pool
    if "replicas" in pool and has_range:
        raise InvalidSpec(f"spec.pools.{role}: give either replicas, or min and max")
    if has_range and not ("min" in pool and "max" in pool):
        raise InvalidSpec(f"spec.pools.{role}: min and max belong together")
    least, most = (pool["min"], pool["max"]) if has_range else (pool.get("replicas", 1),) * 2
    if least > most:
        raise InvalidSpec(f"spec.pools.{role}: min {least} is above max {most}")
    return PoolSpec(least=least, most=most, pods=_pods(pool))


def _pods(component: Mapping[str, Any]) -> PodSettings:
    return PodSettings(
        resources=component.get("resources") or {},
        node_selector=component.get("nodeSelector") or {},
        tolerations=tuple(component.get("tolerations") or ()),
    )


def _settings(spec: Mapping[str, Any], pools: Mapping[str, PoolSpec]) -> tuple[dict[str, object], Config]:
    transport, access = spec.get("transport") or {}, spec.get("access") or {}
    # Each pool has one pod more during an upgrade, and each worker a link to every peer.
    most = {role: pool.most + 1 for role, pool in pools.items()}
    given: dict[str, object] = {
        "log.format": "json",
        "scaling.interval_s": 5.0,
        "router.pairs_per_prefill": max(8, most["decode"]),
        "worker.max_links": max(16, sum(most.values())),
    }
    for table, values in (spec.get("config") or {}).items():
        if not isinstance(values, Mapping):
            raise InvalidSpec(f"spec.config.{table}: must be a table of settings, got {values!r}")
        for key, value in values.items():
            name = f"{table}.{key}"
            if name in _OWN_SETTINGS:
                raise InvalidSpec(f"spec.config.{name}: the operator sets this itself")
            given[name] = tuple(value) if isinstance(value, list) else value
    given.setdefault("router.drain_delay_s", _DRAIN_DELAY_S)
    given |= {
        "worker.model": spec["model"],
        "cluster.secret_file": SECRET_FILE,
        "cluster.insecure": bool(access.get("insecure", False)),
        "transport.strict": transport.get("strict", False),
        "scaling.change_roles": False,  # a pod that starts again has the role of its pool
        "timeouts.drain_s": float((spec.get("drain") or {}).get("seconds", 60)),
    }
    if targets := spec.get("targets"):
        given |= {
            "scaling.ttft_target_s": float(targets["ttftSeconds"]),
            "scaling.itl_target_s": float(targets["itlSeconds"]),
        }
    if kinds := transport.get("kinds"):
        given["transport.kinds"] = tuple(kinds)
    if access.get("keysSecret"):
        given["router.keys_file"] = _KEYS_FILE
    if access.get("tlsSecret"):
        files = {"cert_file": "tls.crt", "key_file": "tls.key", "ca_file": "ca.crt"}
        given |= {f"tls.{key}": f"{_TLS_FOLDER}/{name}" for key, name in files.items()}
    try:
        config = load(flags=given)
        given = {name: value for name, value in given.items() if not name.startswith("scaling.")}
        exposed = load(flags={**given, "router.listen": "0.0.0.0:1", "router.workers_listen": "0.0.0.0:2"})
        check_router(exposed, has_secret=True)
    except ConfigError as error:
        raise InvalidSpec(_in_words_of_the_spec(str(error))) from error
    return given, config


def _in_words_of_the_spec(message: str) -> str:
    if "strangers" in message:
        return (
            "spec.access: strangers could reach the routers: give keysSecret and tlsSecret, or insecure: true"
        )
    return "spec.config: " + message.removeprefix("command line: ")
