"""One role after the other, one set after the other."""

from __future__ import annotations

from typing import Any

from deploy.k8s.operator.manifests import COMPONENT, ROLES, SET, TEMPLATE
from deploy.k8s.operator.rollout import (
    Rollout,
    is_retired,
    is_rolled_out,
    old_sets,
    retire,
    roll_out,
    serving_set,
)

Object = dict[str, Any]


def deployment(role: str, template: str = "new", *, ready: int = 1, generation: int = 1) -> Object:
    names = ("replicas", "updatedReplicas", "availableReplicas")
    return {
        "kind": "Deployment",
        "metadata": {
            "generation": generation,
            "annotations": {TEMPLATE: template},
            "labels": {COMPONENT: role},
        },
        "spec": {"replicas": 1},
        "status": {"observedGeneration": 1, **dict.fromkeys(names, ready)},
    }


WANTED = {role: deployment(role) for role in ROLES}


def test_all_that_is_new_begins_at_once() -> None:
    assert roll_out(WANTED, {}) == Rollout((), "decode")


def test_decode_then_prefill_then_routers() -> None:
    old = {role: deployment(role, "old") for role in ROLES}
    assert roll_out(WANTED, old) == Rollout(("prefill", "router"), "decode")
    assert roll_out(WANTED, {**old, "decode": deployment("decode", ready=0)}).held == ("prefill", "router")
    assert roll_out(WANTED, {**old, "decode": deployment("decode", generation=2)}).held == (
        "prefill",
        "router",
    )
    assert roll_out(WANTED, {**old, "decode": WANTED["decode"]}) == Rollout(("router",), "prefill")
    assert roll_out(WANTED, WANTED) == Rollout((), "")


def test_an_old_pod_that_still_takes_work_is_waited_for() -> None:
    surging = deployment("decode")
    surging["status"]["replicas"] = 2
    assert not is_rolled_out(surging)


def test_routers_go_before_the_workers_that_they_need() -> None:
    objects = [deployment(role) for role in ROLES] + [{"kind": "WorkerPool", "metadata": {}}]
    assert [each["metadata"]["labels"][COMPONENT] for each in retire(objects, [])] == ["router"]
    workers = [each for each in objects if each["metadata"].get("labels", {}).get(COMPONENT) != "router"]
    ending = {"kind": "Pod", "metadata": {"labels": {COMPONENT: "router"}}}
    assert retire(workers, [ending]) == []
    assert retire(workers, []) == workers
    assert not is_retired(workers, [])
    assert not is_retired([], [ending])
    assert is_retired([{"kind": "Service", "metadata": {}}], [])


def test_sets_that_neither_serve_nor_will_are_old() -> None:
    objects = [{"metadata": {"labels": {SET: name}}} for name in ("a", "b", "c", "c")] + [{"metadata": {}}]
    assert old_sets(objects, ("b",)) == ["a", "c"]
    assert serving_set({"spec": {"selector": {SET: "b"}}}) == "b"
    assert serving_set(None) == ""
