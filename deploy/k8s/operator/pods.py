"""The pods of routers and workers: what runs in them, how they are asked, how long they may take to end. Pure."""

from __future__ import annotations

from typing import Any

from deploy.command import arguments_of
from deploy.k8s.operator.spec import PodSettings, ServiceSpec

CLIENTS_PORT = 50051
HTTP_PORT = 8000
WORKERS_PORT = 50052
LINKS_PORT = 7777
METRICS_PORT = 9400
CONFIG_FILE = "/etc/pdserve/config/pdserve.toml"

_ANY = {"IPv4": "0.0.0.0", "IPv6": "[::]"}
_POD_IP = {"IPv4": "$(POD_IP)", "IPv6": "[$(POD_IP)]"}
_USER = 65532


def pod_spec(role: str, spec: ServiceSpec, *, config_map: str, secret: str, routers: str) -> dict[str, Any]:
    """A pod's spec.

    role     router, prefill or decode
    routers  host name that stands for the routers of the pod's set
    """
    is_router = role == "router"
    settings = spec.router_pods if is_router else spec.pools[role].pods
    ports = {"metrics": METRICS_PORT} | (
        {"clients": CLIENTS_PORT, "workers": WORKERS_PORT} if is_router else {"links": LINKS_PORT}
    )
    if is_router and spec.serves_http:
        ports["http"] = HTTP_PORT
    volumes, mounts = _volumes(role, spec, config_map, secret)
    container = {
        "name": role,
        "image": spec.router_image if is_router else spec.worker_image,
        "imagePullPolicy": spec.pull_policy,
        "args": list(arguments_of(role, _values(role, spec, settings, routers), CONFIG_FILE)),
        "env": _environ(role, spec, settings),
        "ports": [
            {"name": name, "containerPort": port, "protocol": "TCP"} for name, port in sorted(ports.items())
        ],
        # Loading a model, or waiting for a worker, is neither an unfinished start nor a failure: that is readiness.
        "startupProbe": _probe("/healthz", period_s=5, failures=60),
        "livenessProbe": _probe("/healthz", period_s=10, failures=3),
        "readinessProbe": _probe("/readyz", period_s=2, failures=2),
        "resources": dict(settings.resources),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": mounts,
    }
    made: dict[str, Any] = {
        "containers": [container],
        "volumes": volumes,
        "terminationGracePeriodSeconds": spec.grace_s(role),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": _USER,
            "runAsGroup": _USER,
            "fsGroup": _USER,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }
    if settings.node_selector:
        made["nodeSelector"] = dict(settings.node_selector)
    if settings.tolerations:
        made["tolerations"] = [dict(each) for each in settings.tolerations]
    if spec.pull_secrets:
        made["imagePullSecrets"] = [{"name": name} for name in spec.pull_secrets]
    return made


def _values(role: str, spec: ServiceSpec, settings: PodSettings, routers: str) -> dict[str, object]:
    any_host, pod_ip = _ANY[spec.ip_family], _POD_IP[spec.ip_family]
    metrics = {"metrics.listen": f"{pod_ip}:{METRICS_PORT}"}
    if role == "router":
        return {
            "router.id": "$(POD_NAME)",
            "router.listen": f"{any_host}:{CLIENTS_PORT}",
            "router.workers_listen": f"{any_host}:{WORKERS_PORT}",
            **({"http.listen": f"{any_host}:{HTTP_PORT}"} if spec.serves_http else {}),
            **metrics,
        }
    values: dict[str, object] = {
        "worker.id": "$(POD_NAME)",
        "worker.routers": f"{routers}:{WORKERS_PORT}",
        "worker.kv_listen": f"{pod_ip}:{LINKS_PORT}",  # peers are told this address, so it is the pod's own
        **metrics,
    }
    if spec.tls_secret and not spec.config.tls.server_name:
        values["tls.server_name"] = routers
    return values


def _environ(role: str, spec: ServiceSpec, settings: PodSettings) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [
        {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
    ]
    if role != "router" and "engine.threads" not in spec.settings:
        # A process sees all of the node's cores, not those that it is given.
        for bound in ("limits", "requests"):
            if "cpu" in settings.resources.get(bound, {}):
                source = {"resourceFieldRef": {"resource": f"{bound}.cpu", "divisor": "1"}}
                return [*found, {"name": "PDSERVE_ENGINE__THREADS", "valueFrom": source}]
    return found


def _probe(path: str, *, period_s: int, failures: int) -> dict[str, Any]:
    return {
        "httpGet": {"path": path, "port": "metrics"},
        "periodSeconds": period_s,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }


def _volumes(
    role: str, spec: ServiceSpec, config_map: str, secret: str
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    found: list[tuple[str, dict[str, Any], str, bool]] = [
        ("config", {"configMap": {"name": config_map}}, "/etc/pdserve/config", True),
        ("secret", {"secret": {"secretName": secret, "defaultMode": 0o440}}, "/etc/pdserve/secret", True),
        ("tmp", {"emptyDir": {}}, "/tmp", False),
    ]
    if spec.tls_secret:
        files = {"secret": {"secretName": spec.tls_secret, "defaultMode": 0o440}}
        found.append(("tls", files, "/etc/pdserve/tls", True))
    if spec.keys_secret and role == "router":
        files = {"secret": {"secretName": spec.keys_secret, "defaultMode": 0o440}}
        found.append(("keys", files, "/etc/pdserve/keys", True))
    if spec.model_claim and role != "router":
        claim = {"persistentVolumeClaim": {"claimName": spec.model_claim, "readOnly": True}}
        found.append(("models", claim, "/models", True))
    volumes = [{"name": name, **source} for name, source, _, _ in found]
    mounts = [{"name": name, "mountPath": path, "readOnly": read_only} for name, _, path, read_only in found]
    return volumes, mounts
