"""The KubeRay manifest fits KubeRay's schema, and its groups are pdserve's roles."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import yaml

from tests.support.crd_schemas import problems
from tests.support.readme import ROOT

MANIFEST = ROOT / "deploy" / "k8s" / "kuberay" / "raycluster.yaml"
SCHEMA = json.loads((ROOT / "tests" / "k8s" / "schemas" / "RayCluster.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def cluster() -> dict[str, Any]:
    found, _ = yaml.safe_load_all(MANIFEST.read_text(encoding="utf-8"))
    assert (found["apiVersion"], found["kind"]) == ("ray.io/v1", "RayCluster")
    return dict(found)


def test_kuberay_takes_it(cluster: dict[str, Any]) -> None:
    assert problems(SCHEMA, cluster) == []


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("spec", "authOption"), {}, "spec.authOption: unknown field"),
        (("spec", "authOptions", "mode"), "Token", "spec.authOptions.mode: 'Token' is not one of"),
        (("spec", "headGroupSpec", "replicas"), 1, "spec.headGroupSpec.replicas: unknown field"),
        (("spec", "workerGroupSpecs", 0, "minReplicas"), "2", "minReplicas: '2' is not of type"),
        (
            ("spec", "workerGroupSpecs", 1, "template", "spec", "containers", 0, "imag"),
            "x",
            "containers.0.imag: unknown field",
        ),
    ],
)
def test_a_mistake_would_be_found(
    cluster: dict[str, Any], path: tuple[str | int, ...], value: object, said: str
) -> None:
    changed = copy.deepcopy(cluster)
    place: Any = changed
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    assert any(said in line for line in problems(SCHEMA, changed)), problems(SCHEMA, changed)


def test_a_group_is_a_role(cluster: dict[str, Any]) -> None:
    """Its custom resource is what Ray sets aside for a process of the role: one a pod."""
    for group in cluster["spec"]["workerGroupSpecs"]:
        text = json.loads(group["rayStartParams"]["resources"])  # KubeRay passes it through a shell
        assert json.loads(text) == {group["groupName"]: 1}
    groups = [group["groupName"] for group in cluster["spec"]["workerGroupSpecs"]]
    assert groups == ["router", "prefill", "decode"]


def test_ray_is_the_version_that_is_tested(cluster: dict[str, Any]) -> None:
    assert f"ray=={cluster['spec']['rayVersion']}" in (ROOT / "constraints.txt").read_text().splitlines()
