"""What the operator makes and is installed by: valid for Kubernetes, and the same pods as the chart's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.k8s.operator import manifests as made
from pdserve.cli.main import build_parser
from pdserve.service.address import split_address
from tests.k8s.test_chart_meaning import config_of, pod_of
from tests.support.helm import OPERATOR_CHART, helm, refusal, render, validate
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

# Values of the operator's own chart.
INSTALLED: dict[str, dict[str, Any]] = {
    "simplest": {},
    "one-namespace": {"watchNamespace": "models", "replicas": 1},
    "ipv6": {"ipFamily": "IPv6", "logLevel": "debug"},
    "own-account": {"serviceAccount": {"name": "mine"}},
    "placed": {
        "fullnameOverride": "a-name-that-goes-on-and-on-and-on-for-ever-and-one-day-more",
        "image": {"repository": "r.example/op", "tag": "1", "pullSecrets": [{"name": "registry"}]},
        "priorityClassName": "system",
        "nodeSelector": {"pool": "system"},
        "tolerations": [{"key": "x", "operator": "Exists"}],
        "affinity": {"podAntiAffinity": {}},
        "podLabels": {"team": "llm", "app.kubernetes.io/name": "mine"},
        "podAnnotations": {"a": "b"},
        "serviceAccount": {"annotations": {"iam": "role"}},
    },
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
@pytest.mark.parametrize("values", INSTALLED.values(), ids=INSTALLED)
def test_what_installs_it_is_valid(values: dict[str, Any], version: str, tmp_path: Path) -> None:
    done = helm("lint", "--strict", str(OPERATOR_CHART), values=values)
    assert done.returncode == 0, done.stdout + done.stderr
    kinds = [yaml.safe_load(file.read_text()) for file in sorted((OPERATOR_CHART / "crds").glob("*.yaml"))]
    validate(tmp_path, [*render(values, chart=OPERATOR_CHART), *kinds], version)


@pytest.mark.parametrize("values", INSTALLED.values(), ids=INSTALLED)
def test_it_has_rights_where_it_looks(values: dict[str, Any]) -> None:
    """And its command line is one; two operators of one namespace agree by the Lease in their own."""
    manifests = render(values, chart=OPERATOR_CHART)
    by_kind = {each["kind"]: each for each in manifests if not each["metadata"]["name"].endswith("-lease")}
    watched = values.get("watchNamespace")
    role = by_kind["Role" if watched else "ClusterRole"]
    assert role["metadata"].get("namespace") == watched
    pod = by_kind["Deployment"]["spec"]["template"]["spec"]
    (subject,) = by_kind["RoleBinding" if watched else "ClusterRoleBinding"]["subjects"]
    assert (subject["name"], subject["namespace"]) == (pod["serviceAccountName"], "llm")
    (container,) = pod["containers"]
    ip = "fd00::7" if values.get("ipFamily") == "IPv6" else "10.1.2.3"
    command = [word.replace("$(POD_IP)", ip) for word in container["args"]]
    parsed = build_parser(command).parse_args(command)
    assert (parsed.namespace, parsed.log_format) == (watched or "", "json")
    assert split_address(parsed.metrics_listen) == (ip, 9400)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"replica": 2}, "replica"),
        ({"replicas": 0}, "/replicas"),
        ({"watchNamespace": "Not a name"}, "/watchNamespace"),
        ({"image": {"repository": ""}}, "/image/repository"),
        ({"logLevel": "loud"}, "/logLevel"),
        ({"resyncSeconds": 0}, "/resyncSeconds"),
    ],
)
def test_bad_values_are_named(values: dict[str, Any], named: str) -> None:
    assert named in refusal(values, chart=OPERATOR_CHART)


@pytest.mark.parametrize("role", made.ROLES)
def test_its_pods_are_the_charts(role: str, tmp_path: Path) -> None:
    """Ports, probes, rights, time to end, and settings."""
    given: dict[str, Any] = {"config": {"engine": {"max_batch": 7}}}
    chart = render({"insecure": True, "model": {"name": "m"}, "router": {"http": True}, **given})
    theirs = pod_of(chart, role)["spec"]
    read = spec(routers={"http": True}, **given)
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
        config_of_ours(role, tmp_path, routers={"http": True}, **given),
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
