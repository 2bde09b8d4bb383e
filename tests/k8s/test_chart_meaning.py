"""What the rendered manifests say: pdserve reads its settings, drains fit into the grace, workers find routers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pdserve.cli.main import build_parser
from pdserve.cli.target import targets_of
from pdserve.service.address import split_address
from pdserve.service.config import Config, load
from pdserve.service.exposure import check_gateway, check_router, check_worker
from pdserve.service.lifecycle import longest_drain_s
from tests.k8s.value_sets import VALUE_SETS
from tests.support.helm import Manifest, one, render

pytestmark = pytest.mark.slow

COMPONENTS = ("router", "prefill", "decode")
_POD = {"IPv4": {"status.podIP": "10.1.2.3"}, "IPv6": {"status.podIP": "fd00::7"}}


def components_of(manifests: list[Manifest]) -> list[str]:
    """That have a Deployment."""
    labels = [each["metadata"]["labels"] for each in manifests if each["kind"] == "Deployment"]
    return [each["app.kubernetes.io/component"] for each in labels]


def pod_of(manifests: list[Manifest], component: str) -> dict[str, Any]:
    [found] = [
        each
        for each in manifests
        if each["kind"] == "Deployment"
        and each["metadata"]["labels"]["app.kubernetes.io/component"] == component
    ]
    pod: dict[str, Any] = found["spec"]["template"]
    return pod


def environ_of(container: dict[str, Any], fields: dict[str, str]) -> dict[str, str]:
    """As the kubelet would make it."""
    made: dict[str, str] = {}
    for variable in container["env"]:
        source = variable.get("valueFrom", {})
        if "fieldRef" in source:
            path = source["fieldRef"]["fieldPath"]
            text = {"metadata.name": "chat-pdserve-x-1", **fields}[path]
        elif "resourceFieldRef" in source:
            bound, resource = source["resourceFieldRef"]["resource"].split(".")
            text = str(container["resources"][bound][resource])
        else:
            text = variable["value"]
            for name, value in made.items():
                text = text.replace(f"$({name})", value)
        made[variable["name"]] = text
    return made


def config_of(manifests: list[Manifest], component: str, folder: Path, family: str = "IPv4") -> Config:
    """What the process would read: the file of the ConfigMap, then the environment. Raises ConfigError."""
    [container] = pod_of(manifests, component)["spec"]["containers"]
    [config_map] = [each for each in manifests if each["kind"] == "ConfigMap"]
    file = folder / f"{component}.toml"
    file.write_text(config_map["data"][f"{component}.toml"])
    environ = environ_of(container, _POD[family])
    return load(file, {name: value for name, value in environ.items() if name != "PDSERVE_CACHE_DIR"})


@pytest.mark.parametrize("name", VALUE_SETS)
def test_every_process_starts_with_its_settings(name: str, tmp_path: Path) -> None:
    """It reads them, would listen where it is told, and drains within the time that its pod has."""
    values = VALUE_SETS[name]
    manifests = render(values)
    assert set(components_of(manifests)) >= set(COMPONENTS)
    for component in components_of(manifests):
        config = config_of(manifests, component, tmp_path, values.get("ipFamily", "IPv4"))
        match component:
            case "router":
                strangers = check_router(config, has_secret=True)
            case "gateway":
                strangers = check_gateway(config)
            case _:
                strangers = check_worker(config, has_secret=True)
        asked = component not in ("router", "gateway") or values["insecure"] is False
        assert (strangers == []) == asked
        spec = pod_of(manifests, component)["spec"]
        delay_s = config.router.drain_delay_s if component in ("router", "gateway") else 0.0
        assert spec["terminationGracePeriodSeconds"] >= longest_drain_s(config.timeouts) + delay_s + 5
        files = (config.cluster.secret_file, config.router.keys_file, *vars_of_tls(config))
        assert {path for path in files if path} <= mounted(spec)


def vars_of_tls(config: Config) -> tuple[str, ...]:
    tls = config.tls
    return (tls.cert_file, tls.key_file, tls.ca_file, tls.client_ca_file)


def mounted(spec: dict[str, Any]) -> set[str]:
    """The files of all Secrets in the container."""
    sources = {volume["name"]: volume["secret"] for volume in spec["volumes"] if "secret" in volume}
    found = set()
    for mount in spec["containers"][0]["volumeMounts"]:
        if mount["name"] in sources:
            items = sources[mount["name"]].get("items") or [{"path": "tls.crt"}, {"path": "tls.key"}]
            found |= {f"{mount['mountPath']}/{item['path']}" for item in items}
    return found


def test_the_grace_follows_the_drain() -> None:
    def graces(values: dict[str, Any]) -> set[int]:
        manifests = render({**VALUE_SETS["simplest"], **values})
        return {pod_of(manifests, each)["spec"]["terminationGracePeriodSeconds"] for each in COMPONENTS}

    assert graces({}) == {75, 80}  # a router serves for 5 s more
    longer = {"engine": {"kind": "fake"}, "timeouts": {"drain_s": 300.2, "lease_s": 5.5}}
    assert graces({"config": longer}) == {316, 321}
    assert graces({"decode": {"terminationGracePeriodSeconds": 600}}) == {75, 80, 600}


def test_workers_find_routers_that_are_not_ready(tmp_path: Path) -> None:
    """A router is ready only once a worker has joined it."""
    manifests = render()
    headless = one(manifests, "Service", "chat-pdserve-routers")["spec"]
    assert headless["clusterIP"] == "None"
    assert headless["publishNotReadyAddresses"] is True
    [port] = headless["ports"]
    [dialled] = config_of(manifests, "decode", tmp_path).worker.routers
    assert split_address(dialled) == ("chat-pdserve-routers.llm.svc", port["port"])
    router = config_of(manifests, "router", tmp_path).router
    assert split_address(router.workers_listen) == ("0.0.0.0", port["port"])
    clients = one(manifests, "Service", "chat-pdserve")["spec"]
    assert "publishNotReadyAddresses" not in clients
    assert headless["selector"] == clients["selector"]
    labels = pod_of(manifests, "router")["metadata"]["labels"]
    assert headless["selector"].items() <= labels.items()


@pytest.mark.parametrize(("name", "host"), [("simplest", "10.1.2.3"), ("ipv6", "fd00::7")])
def test_links_and_metrics_are_at_the_address_of_the_pod(name: str, host: str, tmp_path: Path) -> None:
    manifests = render(VALUE_SETS[name])
    family = VALUE_SETS[name].get("ipFamily", "IPv4")
    for component in COMPONENTS:
        config = config_of(manifests, component, tmp_path, family)
        assert split_address(config.metrics.listen) == (host, 9400)
        if component != "router":
            assert split_address(config.worker.kv_listen) == (host, 7777)
    assert split_address(config_of(manifests, "router", tmp_path, family).router.listen)[0] == (
        "::" if family == "IPv6" else "0.0.0.0"
    )


def test_pairs_and_links_are_laid_out_for_the_pools(tmp_path: Path) -> None:
    def laid_out(name: str) -> tuple[int, int, int]:
        manifests = render(VALUE_SETS[name])
        router = config_of(manifests, "router", tmp_path).router
        prefill, decode = (config_of(manifests, pool, tmp_path).worker for pool in ("prefill", "decode"))
        return router.pairs_per_prefill, prefill.max_links, decode.max_links

    assert laid_out("simplest") == (8, 16, 16)
    assert laid_out("large") == (40, 62, 62)
    assert laid_out("scaled-by-others") == (24, 34, 34)
    assert laid_out("room-to-grow") == (30, 33, 33)
    assert laid_out("settings-of-each") == (3, 16, 99)  # what somebody sets stands


def test_each_component_has_its_own_settings_before_those_of_all(tmp_path: Path) -> None:
    manifests = render(VALUE_SETS["settings-of-each"])
    prefill, decode = (config_of(manifests, pool, tmp_path).engine for pool in ("prefill", "decode"))
    assert (prefill.prefix_cache, decode.prefix_cache) == (False, True)  # false, too, stands above true
    assert (prefill.kv_memory_bytes, decode.kv_memory_bytes) == (1 << 35, 1 << 35)
    assert (prefill.threads, decode.threads) == (2, 4)  # 0: of the pod's cores
    assert decode.max_batch == 256
    assert config_of(manifests, "router", tmp_path).timeouts.drain_s == 120.5


def test_a_change_of_settings_replaces_the_pods_that_it_concerns() -> None:
    def sums(values: dict[str, Any]) -> list[str]:
        manifests = render({**VALUE_SETS["simplest"], **values})
        return [pod_of(manifests, each)["metadata"]["annotations"]["checksum/config"] for each in COMPONENTS]

    before, after = sums({}), sums({"decode": {"config": {"engine": {"max_batch": 8}}}})
    assert [old != new for old, new in zip(before, after, strict=True)] == [False, False, True]


def test_compute_threads_are_the_cores_of_the_pod(tmp_path: Path) -> None:
    assert config_of(render(VALUE_SETS["simplest"]), "decode", tmp_path).engine.threads == 2
    assert config_of(render(VALUE_SETS["gpus"]), "decode", tmp_path).engine.threads == 8


@pytest.mark.parametrize("name", VALUE_SETS)
def test_pods_are_confined(name: str) -> None:
    """No root, no token, no capabilities; nothing to write but /tmp; no variables that pdserve would read."""
    manifests = render(VALUE_SETS[name])
    for component in components_of(manifests):
        spec = pod_of(manifests, component)["spec"]
        assert spec["automountServiceAccountToken"] is False
        assert spec["enableServiceLinks"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        for container in (*spec["containers"], *spec.get("initContainers", ())):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert "command" not in container  # the image's: python as PID 1, no shell
            assert "lifecycle" not in container  # SIGTERM drains
            writable = {each["mountPath"] for each in container["volumeMounts"] if not each.get("readOnly")}
            assert writable <= {"/tmp", "/models"}


def test_probes_ask_the_process() -> None:
    manifests = render(VALUE_SETS["gateways"])
    assert components_of(manifests) == [*COMPONENTS, "gateway"]
    for component in components_of(manifests):
        [container] = pod_of(manifests, component)["spec"]["containers"]
        asked = {
            kind: container[f"{kind}Probe"]["httpGet"]["path"]
            for kind in ("startup", "liveness", "readiness")
        }
        assert asked == {"startup": "/healthz", "liveness": "/healthz", "readiness": "/readyz"}
        assert {"name": "metrics", "containerPort": 9400} in container["ports"]


def test_a_pool_that_others_scale_has_no_number() -> None:
    manifests = render(VALUE_SETS["scaled-by-others"])
    assert "replicas" not in one(manifests, "Deployment", "chat-pdserve-decode")["spec"]
    assert one(manifests, "Deployment", "chat-pdserve-router")["spec"]["replicas"] == 2


def test_who_may_reach_what() -> None:
    manifests = render(VALUE_SETS["policies"])
    router = one(manifests, "NetworkPolicy", "chat-pdserve-router")["spec"]
    by_port = {rule["ports"][0]["port"]: rule["from"] for rule in router["ingress"]}
    assert set(by_port) == {"clients", "workers"}  # nobody reads metrics unless told
    assert [set(peer) for peer in by_port["clients"]] == [{"ipBlock"}, {"namespaceSelector"}]
    own, admins = by_port["workers"]
    assert own["podSelector"]["matchExpressions"][0]["values"] == ["prefill", "decode", "operator"]
    assert admins == {"podSelector": {"matchLabels": {"role": "admin"}}}
    workers = one(manifests, "NetworkPolicy", "chat-pdserve-workers")["spec"]
    assert [rule["ports"][0]["port"] for rule in workers["egress"]] == [53, 50052, 7777, 443, 3128]
    closed = one(render(VALUE_SETS["nobody-in"]), "NetworkPolicy", "chat-pdserve-router")["spec"]
    assert [rule["ports"][0]["port"] for rule in closed["ingress"]] == ["workers"]


@pytest.mark.parametrize("name", ["gateways", "gateways-and-tls", "gateways-ipv6"])
def test_gateways_ask_ready_routers_and_are_asked_by_http(name: str, tmp_path: Path) -> None:
    """With a certificate of theirs where routers want one, and the name in that of the routers."""
    values = VALUE_SETS[name]
    manifests = render(values)
    (container,) = pod_of(manifests, "gateway")["spec"]["containers"]
    command = [
        word.replace("=/etc/pdserve/config/pdserve.toml", f"={tmp_path}") for word in container["args"]
    ]
    parsed = build_parser(command).parse_args(command)
    clients = one(manifests, "Service", "chat-pdserve")["spec"]
    assert targets_of(parsed) == [f"chat-pdserve.llm.svc:{clients['ports'][0]['port']}"]
    files = {path for path in (parsed.tls_ca, parsed.tls_cert, parsed.tls_key) if path}
    assert files <= mounted(pod_of(manifests, "gateway")["spec"])
    assert len(files) == (3 if name == "gateways-and-tls" else 0)
    assert parsed.tls_server_name == ("llm.example.com" if files else "")
    config = config_of(manifests, "gateway", tmp_path, values.get("ipFamily", "IPv4"))
    assert split_address(config.http.listen) == ("::" if name == "gateways-ipv6" else "0.0.0.0", 8000)
    assert "secret" not in {
        each["name"] for each in container["volumeMounts"]
    }  # it is no part of the cluster
    (port,) = one(manifests, "Service", "chat-pdserve-gateway")["spec"]["ports"]
    assert (port["targetPort"], port["appProtocol"]) == ("http", "https" if files else "http")
    assert {"name": "http", "containerPort": 8000} in container["ports"]


def test_http_at_the_routers_themselves(tmp_path: Path) -> None:
    manifests = render(VALUE_SETS["http"])
    assert config_of(manifests, "router", tmp_path).http.listen == "0.0.0.0:8000"
    assert config_of(manifests, "decode", tmp_path).http.listen == ""
    ports = {
        each["name"]: each["port"] for each in one(manifests, "Service", "chat-pdserve")["spec"]["ports"]
    }
    assert ports == {"clients": 50051, "http": 80}
    policy = one(manifests, "NetworkPolicy", "chat-pdserve-router")["spec"]
    assert [each["port"] for each in policy["ingress"][0]["ports"]] == ["clients", "http"]
    assert config_of(render(), "router", tmp_path).http.listen == ""


def test_who_may_reach_gateways_and_whom_they_reach() -> None:
    manifests = render(VALUE_SETS["gateways-and-tls"])
    policy = one(manifests, "NetworkPolicy", "chat-pdserve-gateway")["spec"]
    labels = pod_of(manifests, "gateway")["metadata"]["labels"]
    assert policy["podSelector"]["matchLabels"].items() <= labels.items()
    assert [rule["ports"][0]["port"] for rule in policy["ingress"]] == ["http", "metrics"]
    assert [rule["ports"][0]["port"] for rule in policy["egress"]] == [53, 50051]
    router = one(manifests, "NetworkPolicy", "chat-pdserve-router")["spec"]
    peers = [rule["from"] for rule in router["ingress"] if rule["ports"][0]["port"] == "clients"]
    assert peers[1] == [{"podSelector": policy["podSelector"]}]
    assert "egress" in router and len(one(manifests, "PodDisruptionBudget", "chat-pdserve-gateway")["spec"])


def test_workers_check_the_name_of_the_clients_service(tmp_path: Path) -> None:
    tls = config_of(render(VALUE_SETS["keys-and-tls"]), "decode", tmp_path).tls
    assert (tls.server_name, tls.cert_file) == ("chat-pdserve.llm.svc", "")
    tls = config_of(render(VALUE_SETS["mutual-tls"]), "decode", tmp_path).tls
    assert (tls.server_name, tls.cert_file) == ("llm.example.com", "/etc/pdserve/tls/tls.crt")
    [asks, does_not] = [
        config_of(render(VALUE_SETS[name]), "router", tmp_path).tls.ca_file
        for name in ("mutual-tls", "keys-and-tls")
    ]
    assert (asks, does_not) == ("/etc/pdserve/authorities/ca.crt", "")


def test_the_drawn_secret_is_long_enough() -> None:
    [secret] = [each for each in render() if each["kind"] == "Secret"]
    assert len(secret["data"]["secret"]) >= 32 * 4 / 3
    assert [each for each in render(VALUE_SETS["own-secret"]) if each["kind"] == "Secret"] == []
