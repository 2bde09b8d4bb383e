"""What the operator makes and is installed by: valid for Kubernetes, and the same pods as the chart's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.k8s.operator import manifests as made
from tests.k8s.test_chart_meaning import config_of, pod_of
from tests.support.helm import render, validate
from tests.support.readme import ROOT
from tests.unit.deploy.operator.services import OWNER, spec
from tests.unit.deploy.operator.test_manifests import POOL
from tests.unit.deploy.operator.test_manifests import config_of as config_of_ours
from tools.k8s_tools import KUBERNETES_VERSIONS

pytestmark = pytest.mark.slow

CPU = {"limits": {"cpu": "4", "memory": "4Gi"}}
WHOLE: dict[str, Any] = {
    "modelClaim": "models",
    "access": {"keysSecret": "keys", "tlsSecret": "tls"},
    "images": {"router": "r", "worker": "w", "pullSecrets": ["pull"]},
    "routers": {"nodeSelector": {"a": "b"}, "tolerations": [{"key": "x", "operator": "Exists"}]},
    "pools": {"prefill": {"resources": CPU}, "decode": {"min": 1, "max": 3}},
}


@pytest.mark.parametrize("version", KUBERNETES_VERSIONS)
@pytest.mark.parametrize("given", [{}, WHOLE, {"ipFamily": "IPv6"}])
def test_all_that_it_makes_is_valid(given: dict[str, Any], version: str, tmp_path: Path) -> None:
    read = spec(**given)
    found = [made.deployment(OWNER, read, role, POOL) for role in made.ROLES]
    found += [made.disruption_budget(OWNER, read.set_id, role) for role in made.ROLES]
    found += [made.config_map(OWNER, read), made.cluster_secret(OWNER, b"s" * 32)]
    found += [made.client_service(OWNER, read, read.set_id), made.workers_service(OWNER, read.set_id)]
    validate(tmp_path, found, version)


@pytest.mark.parametrize("version", KUBERNETES_VERSIONS)
def test_what_installs_it_is_valid(version: str, tmp_path: Path) -> None:
    folder = ROOT / "deploy/k8s/operator"
    installed = list(yaml.safe_load_all((folder / "install.yaml").read_text()))
    kinds = [yaml.safe_load(file.read_text()) for file in sorted((folder / "crds").glob("*.yaml"))]
    validate(tmp_path, [*installed, *kinds], version)


@pytest.mark.parametrize("role", made.ROLES)
def test_its_pods_are_the_charts(role: str, tmp_path: Path) -> None:
    """Ports, probes, rights, time to end, and settings."""
    chart = render({"insecure": True, "model": {"name": "m"}, "config": {"engine": {"max_batch": 7}}})
    theirs = pod_of(chart, role)["spec"]
    read = spec(config={"engine": {"max_batch": 7}})
    ours = made.deployment(OWNER, read, role, POOL)["spec"]["template"]["spec"]
    (their_container,), (our_container,) = theirs["containers"], ours["containers"]
    for name in ("livenessProbe", "readinessProbe", "securityContext"):
        assert without_defaults(our_container[name]) == without_defaults(their_container[name]), name
    for name in ("securityContext", "automountServiceAccountToken", "enableServiceLinks"):
        assert ours[name] == theirs[name], name
    assert {(each["name"], each["containerPort"]) for each in our_container["ports"]} == {
        (each["name"], each["containerPort"]) for each in their_container["ports"]
    }
    assert ours["terminationGracePeriodSeconds"] >= theirs["terminationGracePeriodSeconds"]
    first, second = (
        config_of(chart, role, tmp_path),
        config_of_ours(role, tmp_path, config={"engine": {"max_batch": 7}}),
    )
    differ = {name for name, value in first.effective().items() if second.effective()[name] != value}
    of_others = ("scaling.", "worker." if role == "router" else "router.")
    assert {name for name in differ if not name.startswith(of_others)} <= {
        *("router.id", "worker.id", "worker.routers", "worker.kv_listen", "metrics.listen"),
        *("worker.max_links", "router.pairs_per_prefill", "engine.threads", "worker.model", "worker.role"),
        *("router.listen", "router.workers_listen"),
    }, differ


def without_defaults(value: dict[str, Any]) -> dict[str, Any]:
    """As an API server would compare them."""
    return {name: each for name, each in value.items() if (name, each) != ("failureThreshold", 3)}
