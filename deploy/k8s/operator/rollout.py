"""What may change next: one role after the other within a set, one set after the other. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from deploy.k8s.operator.manifests import ROLES, SET, TEMPLATE, Manifest, role_of, set_of


@dataclass(frozen=True, slots=True)
class Rollout:
    """How far the Deployments of one set are.

    held     roles whose pods stay as they are until those before them are replaced
    waiting  the role whose pods are being replaced or made; "" = none, all is as wanted
    """

    held: tuple[str, ...]
    waiting: str


def roll_out(wanted: Mapping[str, Manifest], seen: Mapping[str, Manifest]) -> Rollout:
    """Of Deployments by role. A role that has none yet is never held: nothing of it serves that could be upset."""
    held: list[str] = []
    waiting = ""
    for role in ROLES:
        now = seen.get(role)
        is_new = now is not None and template_of(now) == template_of(wanted[role])
        if waiting and now is not None and not is_new:
            held.append(role)
        elif not waiting and not (is_new and now is not None and is_rolled_out(now)):
            waiting = role
    return Rollout(tuple(held), waiting)


def is_rolled_out(deployment: Manifest) -> bool:
    """Whether all pods are of the newest template and ready, and none of an older one is left that takes work."""
    wanted, status = deployment["spec"].get("replicas", 1), deployment.get("status", {})
    return bool(
        status.get("observedGeneration", 0) >= deployment["metadata"].get("generation", 0)
        and status.get("updatedReplicas", 0) == wanted
        and status.get("replicas", 0) == wanted
        and status.get("availableReplicas", 0) == wanted
    )


def template_of(deployment: Manifest) -> str:
    """Which template the operator gave it last."""
    return str((deployment["metadata"].get("annotations") or {}).get(TEMPLATE, ""))


def serving_set(client_service: Manifest | None) -> str:
    """The set to which clients' connections go; "" = to none yet."""
    return "" if client_service is None else str(client_service["spec"].get("selector", {}).get(SET, ""))


def old_sets(seen: Iterable[Manifest], keep: Sequence[str]) -> list[str]:
    """Sets that have objects and are neither wanted nor serve."""
    return sorted({set_of(each) for each in seen} - {"", *keep})


def retire(objects: Iterable[Manifest], pods: Iterable[Manifest]) -> list[Manifest]:
    """What to delete next of a set, or of all of them, so that every request ends well: [] = nothing is left.

    objects  Deployments, WorkerPools, and what else belongs to the set
    Routers first: they finish what they have, for which they need the workers.
    """
    found = list(objects)
    routers = [each for each in found if each["kind"] == "Deployment" and role_of(each) == "router"]
    if routers:
        return routers
    if any(role_of(pod) == "router" for pod in pods):
        return []
    return found


def is_retired(objects: Iterable[Manifest], pods: Iterable[Manifest]) -> bool:
    """Whether nothing is left that runs or would be started."""
    return not any(each["kind"] in ("Deployment", "WorkerPool") for each in objects) and not list(pods)
