"""Who goes when a pool shrinks: pods with the least to do, by the cost that a ReplicaSet compares."""

from __future__ import annotations

from collections.abc import Sequence

from deploy.k8s.operator.api import Api
from deploy.k8s.operator.manifests import Manifest
from pdserve.status import ClusterStatus, WorkerStatus

_COST = "controller.kubernetes.io/pod-deletion-cost"


def costs(pods: Sequence[Manifest], answers: Sequence[ClusterStatus | None]) -> dict[str, str]:
    """Pod name → its cost, where the pod says another one; pods of which no router knows keep theirs."""
    known: dict[str, WorkerStatus] = {
        worker.id: worker for answer in answers if answer is not None for worker in answer.workers
    }
    found = {}
    for pod in pods:
        name, annotations = pod["metadata"]["name"], pod["metadata"].get("annotations") or {}
        if (worker := known.get(name)) is None:
            continue
        cost = str(worker.num_running + worker.num_waiting + (worker.num_queued_tokens + 999) // 1000)
        if annotations.get(_COST, "0") != cost:
            found[name] = cost
    return found


async def mark(api: Api, pods: Sequence[Manifest], answers: Sequence[ClusterStatus | None]) -> None:
    """Write the costs; a ReplicaSet deletes pods that aren't ready before all others. Raises what Api raises."""
    changed = costs(pods, answers)
    for pod in pods:
        if cost := changed.get(pod["metadata"]["name"]):
            await api.annotate(pod, {_COST: cost})
