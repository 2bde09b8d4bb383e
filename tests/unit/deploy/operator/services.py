"""A spec as tests begin with."""

from __future__ import annotations

from typing import Any

from deploy.k8s.operator.manifests import ServiceOwner
from deploy.k8s.operator.spec import ServiceSpec, read_spec

OWNER = ServiceOwner(name="one", namespace="ns", uid="uid-one")


def raw(**more: Any) -> dict[str, Any]:
    return {"model": "m", "images": {"router": "r", "worker": "w"}, "access": {"insecure": True}, **more}


def spec(**more: Any) -> ServiceSpec:
    return read_spec(raw(**more))
