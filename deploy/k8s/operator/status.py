"""The status of a DisaggregatedService: conditions with a reason that a person can act on. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from deploy.k8s.operator.manifests import ROLES, Manifest, role_of
from deploy.k8s.operator.rollout import is_rolled_out

_STUCK = {
    "CrashLoopBackOff",
    "CreateContainerConfigError",
    "CreateContainerError",
    "ErrImageNeverPull",
    "ErrImagePull",
    "ImagePullBackOff",
    "InvalidImageName",
    "RunContainerError",
}
_LONGEST = 1000  # characters of a message


@dataclass(frozen=True, slots=True)
class Condition:
    """type  Available, Progressing or Degraded"""

    type: str
    holds: bool
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why it is Degraded."""

    reason: str
    message: str


def available(deployments: Mapping[str, Manifest]) -> Condition:
    """deployments  by role, of the set that serves"""
    lacking = [
        role
        for role in reversed(ROLES)
        if role not in deployments or not deployments[role].get("status", {}).get("availableReplicas", 0)
    ]
    if lacking:
        return Condition("Available", False, "NoReadyPod", f"no {' and no '.join(lacking)} pod is ready")
    return Condition("Available", True, "Serving", "at least one pod of each role is ready")


def progressing(
    waiting: str, deployments: Mapping[str, Manifest], switching: str, leaving: Sequence[str]
) -> Condition:
    """What is under way.

    waiting    the role whose pods are being replaced or made
    switching  the set that is to serve and doesn't yet
    leaving    sets that are drained
    """
    if waiting:
        now = deployments.get(waiting, {})
        wanted, status = now.get("spec", {}).get("replicas", 0), now.get("status", {})
        ready = min(status.get("updatedReplicas", 0), status.get("availableReplicas", 0), wanted)
        message = f"{ready} of {wanted} {waiting} pods are up to date and ready"
        if switching:
            message += f"; set {switching} takes over when all of its pods are"
        return Condition("Progressing", True, "RollingOut", message)
    if leaving:
        return Condition(
            "Progressing", True, "DrainingOldSet", f"set {', '.join(leaving)} finishes its requests"
        )
    return Condition("Progressing", False, "Complete", "every pod is as the spec wants it")


def degraded(trouble: Trouble | None) -> Condition:
    """None = nothing is wrong."""
    if trouble is None:
        return Condition("Degraded", False, "AsExpected", "nothing is wrong")
    return Condition("Degraded", True, trouble.reason, trouble.message[:_LONGEST])


def trouble_of(deployments: Iterable[Manifest], pods: Iterable[Manifest]) -> Trouble | None:
    """The first thing that will not mend itself."""
    for pod in pods:
        if trouble := _trouble_of_pod(pod):
            return trouble
    for each in deployments:
        name = each["metadata"]["name"]
        for condition in each.get("status", {}).get("conditions", ()):
            kind, holds = condition["type"], condition["status"] == "True"
            if kind == "ReplicaFailure" and holds:
                return Trouble("PodsRefused", f"{name}: {condition.get('message', '')}")
            if (
                kind == "Progressing"
                and not holds
                and condition.get("reason") == "ProgressDeadlineExceeded"
                and not is_rolled_out(each)
            ):
                return Trouble(
                    "RolloutStuck",
                    f"{name}: new pods aren't ready after {each['spec'].get('progressDeadlineSeconds')} s, the old "
                    f"ones go on serving: see the logs of {role_of(each)} pods; if their wire version doesn't fit, "
                    'set spec.upgrade.strategy to "NewSet"; undo the change of the spec to go back',
                )
    return None


def _trouble_of_pod(pod: Manifest) -> Trouble | None:
    name, status = pod["metadata"]["name"], pod.get("status", {})
    for condition in status.get("conditions", ()):
        if condition["type"] == "PodScheduled" and condition.get("reason") == "Unschedulable":
            return Trouble("Unschedulable", f"{name}: {condition.get('message', '')}")
    for container in status.get("containerStatuses", ()):
        waiting = container.get("state", {}).get("waiting", {})
        if waiting.get("reason") in _STUCK:
            ended = container.get("lastState", {}).get("terminated", {})
            said = ended.get("message") or waiting.get("message", "")
            code = f", exit code {ended['exitCode']}" if "exitCode" in ended else ""
            return Trouble(str(waiting["reason"]), f"{name}{code}: {said}".strip())
    return None


def made_status(
    before: Mapping[str, Any],
    conditions: Sequence[Condition],
    *,
    generation: int,
    now: datetime,
    deployments: Mapping[str, Manifest],
    set_id: str,
    scaling: str = "",
) -> dict[str, Any]:
    """The whole status; a condition that says the same as before keeps its time."""
    old = {each["type"]: each for each in before.get("conditions", ())}
    shown = []
    for each in conditions:
        text = "True" if each.holds else "False"
        was = old.get(each.type, {})
        since = was.get("lastTransitionTime") if was.get("status") == text else None
        shown.append(
            {
                "type": each.type,
                "status": text,
                "reason": each.reason,
                "message": each.message,
                "lastTransitionTime": since or now.strftime("%Y-%m-%dT%H:%M:%SZ"),
                "observedGeneration": generation,
            }
        )
    pools = {}
    for role, deployment in deployments.items():
        wanted = deployment["spec"].get("replicas", 0)
        ready = deployment.get("status", {}).get("readyReplicas", 0)
        pools[role] = {"replicas": wanted, "ready": ready, "shown": f"{ready}/{wanted}"}
    by_type = {each.type: each for each in conditions}
    summary = next(
        (by_type[kind].reason for kind in ("Degraded", "Progressing") if by_type[kind].holds),
        "Ready" if by_type["Available"].holds else "NotReady",
    )
    return {
        "observedGeneration": generation,
        "conditions": shown,
        "pools": pools,
        # None removes a field. An empty text isn't written: kube-apiserver 1.20 makes null of it, and refuses that.
        "set": set_id or None,
        "scaling": scaling or None,
        "state": summary,
    }
