"""Conditions: a reason that a person can act on, and times that change only with the status."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

from deploy.k8s.operator.manifests import ROLES
from deploy.k8s.operator.status import Trouble, available, degraded, made_status, progressing, trouble_of

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def deployment(role: str = "decode", ready: int = 1, wanted: int = 1, **status: Any) -> dict[str, Any]:
    names = ("replicas", "updatedReplicas", "availableReplicas", "readyReplicas")
    return {
        "metadata": {
            "name": f"one-{role}",
            "generation": 1,
            "labels": {"app.kubernetes.io/component": role},
        },
        "spec": {"replicas": wanted, "progressDeadlineSeconds": 600},
        "status": {"observedGeneration": 1, **dict.fromkeys(names, ready), **status},
    }


def all_ready() -> dict[str, Any]:
    return {role: deployment(role) for role in ROLES}


def pod(**container: Any) -> dict[str, Any]:
    return {"metadata": {"name": "p"}, "status": {"containerStatuses": [container]}}


def test_it_is_available_while_each_role_has_a_ready_pod() -> None:
    assert available(all_ready()).holds
    lacking = available({**all_ready(), "prefill": deployment("prefill", ready=0)})
    assert not lacking.holds and lacking.message == "no prefill pod is ready"
    assert available({}).message == "no router and no prefill and no decode pod is ready"


def test_what_is_under_way_is_counted() -> None:
    deployments = {**all_ready(), "decode": deployment(ready=1, wanted=3)}
    assert progressing("decode", deployments, "", ()).message == "1 of 3 decode pods are up to date and ready"
    assert "set b takes over" in progressing("decode", deployments, "b", ()).message
    assert progressing("", deployments, "", ("a",)).reason == "DrainingOldSet"
    assert not progressing("", deployments, "", ()).holds


def test_pods_that_wont_mend_are_named() -> None:
    ended = {"terminated": {"exitCode": 2, "message": "error: model m: no such file"}}
    waiting = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 40s"}}
    assert trouble_of([], [pod(state=waiting, lastState=ended)]) == Trouble(
        "CrashLoopBackOff", "p, exit code 2: error: model m: no such file"
    )
    pull = {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}
    assert trouble_of([], [pod(state=pull)]) == Trouble("ImagePullBackOff", "p: no such image")
    assert trouble_of([], [pod(state={"waiting": {"reason": "ContainerCreating"}})]) is None
    lacks = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no GPU"}
    unscheduled = {"metadata": {"name": "p"}, "status": {"conditions": [lacks]}}
    assert trouble_of([], [unscheduled]) == Trouble("Unschedulable", "p: no GPU")


def test_a_rollout_that_is_stuck_says_how_to_go_on() -> None:
    stuck = {"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded"}
    found = trouble_of([deployment(ready=1, wanted=2, conditions=[stuck])], [])
    assert found is not None and found.reason == "RolloutStuck" and "NewSet" in found.message
    refused = {"type": "ReplicaFailure", "status": "True", "message": "exceeded quota"}
    found = trouble_of([deployment(conditions=[refused])], [])
    assert found is not None and found.message == "one-decode: exceeded quota"


def test_a_time_changes_only_with_the_status() -> None:
    def status(before: dict[str, Any], hour: int, trouble: Trouble | None) -> dict[str, Any]:
        conditions = (available(all_ready()), progressing("", all_ready(), "", ()), degraded(trouble))
        now = NOON.replace(hour=hour)
        return made_status(before, conditions, generation=3, now=now, deployments=all_ready(), set_id="x")

    first = status({}, 12, None)
    second = status(first, 13, None)
    assert first == second
    third = status(second, 14, Trouble("CrashLoopBackOff", "p: no"))
    times = {each["type"]: each["lastTransitionTime"][11:13] for each in third["conditions"]}
    assert times == {"Available": "12", "Progressing": "12", "Degraded": "14"}
    assert (first["state"], third["state"]) == ("Ready", "CrashLoopBackOff")


def test_no_text_is_empty() -> None:
    """kube-apiserver 1.20 makes null of it, and refuses that."""
    conditions = (available({}), progressing("", {}, "", ()), degraded(None))
    made = made_status({}, conditions, generation=1, now=NOON, deployments={}, set_id="")
    assert '""' not in json.dumps(made)
