"""What a spec becomes: processes start with these arguments, and agree on names and ports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deploy.k8s.operator import manifests as made
from pdserve.cli.main import build_parser
from pdserve.cli.settings import ROUTER, WORKER, read_settings
from pdserve.service.config import Config
from tests.unit.deploy.operator.services import OWNER, spec

POOL = {"metadata": {"name": "one-decode-x", "uid": "uid-pool"}}
ADDRESSES = {"IPv4": "10.1.2.3", "IPv6": "fd00::7"}


def config_of(role: str, folder: Path, family: str = "IPv4", **given: Any) -> Config:
    """What a process in the pod reads."""
    read = spec(ipFamily=family, **given)
    pod = made.deployment(OWNER, read, role, POOL)["spec"]["template"]["spec"]
    file = folder / "pdserve.toml"
    file.write_text(made.config_map(OWNER, read)["data"]["pdserve.toml"])
    environ = {"$(POD_NAME)": "one-x-1", "$(POD_IP)": ADDRESSES[family], "/etc/pdserve/config": str(folder)}
    arguments = pod["containers"][0]["args"]
    for name, value in environ.items():
        arguments = [each.replace(name, value) for each in arguments]
    return read_settings(
        build_parser(arguments).parse_args(arguments), ROUTER if role == "router" else WORKER, {}
    )


@pytest.mark.parametrize("family", ADDRESSES)
@pytest.mark.parametrize("role", made.ROLES)
def test_every_process_reads_its_settings(role: str, family: str, tmp_path: Path) -> None:
    config = config_of(role, tmp_path, family, config={"engine": {"max_batch": 7}}, drain={"seconds": 33})
    assert (config.engine.max_batch, config.timeouts.drain_s) == (7, 33)
    if role == "router":
        assert config.router.id == "one-x-1"
        assert config.router.listen.endswith(":50051") and config.router.workers_listen.endswith(":50052")
    else:
        assert (config.worker.id, config.worker.model) == ("one-x-1", "m")
        host = f"[{ADDRESSES[family]}]" if family == "IPv6" else ADDRESSES[family]
        assert config.worker.kv_listen == f"{host}:7777"
        assert config.worker.routers == (f"{OWNER.workers_host(spec().set_id)}:50052",)


def test_routers_are_found_before_they_are_ready() -> None:
    service = made.workers_service(OWNER, "x")["spec"]
    assert service["clusterIP"] == "None" and service["publishNotReadyAddresses"]
    router = made.deployment(OWNER, spec(), "router")
    labels = router["spec"]["template"]["metadata"]["labels"]
    selected = made.client_service(OWNER, spec(), spec().set_id)["spec"]["selector"]
    assert selected.items() <= labels.items()
    assert router["spec"]["selector"]["matchLabels"].items() <= labels.items()


def test_the_names_of_ports_are_those_of_the_container() -> None:
    for manifest in (made.client_service(OWNER, spec(), "x"), made.workers_service(OWNER, "x")):
        pod = made.deployment(OWNER, spec(), "router")["spec"]["template"]["spec"]
        ports = {each["name"]: each["containerPort"] for each in pod["containers"][0]["ports"]}
        assert all(ports[each["targetPort"]] == each["port"] for each in manifest["spec"]["ports"])


def test_http_is_served_where_it_is_asked_for(tmp_path: Path) -> None:
    assert config_of("router", tmp_path, routers={"http": True}).http.listen == "0.0.0.0:8000"
    assert config_of("decode", tmp_path, routers={"http": True}).http.listen == ""
    assert config_of("router", tmp_path).http.listen == ""
    read = spec(routers={"http": True})
    ports = [each["name"] for each in made.client_service(OWNER, read, read.set_id)["spec"]["ports"]]
    assert ports == ["clients", "http"]
    (container,) = made.deployment(OWNER, read, "router")["spec"]["template"]["spec"]["containers"]
    assert set(ports) <= {each["name"] for each in container["ports"]}


def test_another_config_is_another_file_and_another_template() -> None:
    first, second = spec(), spec(config={"engine": {"max_batch": 7}})
    assert (
        made.config_map(OWNER, first)["metadata"]["name"]
        != made.config_map(OWNER, second)["metadata"]["name"]
    )
    templates = [
        made.deployment(OWNER, each, "decode", POOL)["metadata"]["annotations"][made.TEMPLATE]
        for each in (first, second)
    ]
    assert len(set(templates)) == 2


def test_replicas_are_left_to_whoever_scales() -> None:
    assert "replicas" not in made.deployment(OWNER, spec(), "decode", POOL)["spec"]
    free = made.worker_pool(OWNER, spec(pools={"decode": {"min": 1, "max": 4}}), "decode", None)
    assert "replicas" not in free["spec"] and free["spec"]["scaledBy"] == "Scale"
    fixed = made.worker_pool(OWNER, spec(), "decode", 1)
    assert fixed["spec"]["scaledBy"] == "Service"


def test_threads_are_the_cores_of_the_container() -> None:
    pools = {"decode": {"resources": {"limits": {"cpu": "4"}}}}
    for given, expected in (({}, 1), ({"config": {"engine": {"threads": 3}}}, 0)):
        pod = made.deployment(OWNER, spec(pools=pools, **given), "decode", POOL)["spec"]["template"]["spec"]
        names = [each["name"] for each in pod["containers"][0]["env"]]
        assert names.count("PDSERVE_ENGINE__THREADS") == expected


def test_whoever_covers_a_manifest_may_have_more() -> None:
    wanted = {"spec": {"replicas": 1, "list": [{"a": 1}]}}
    assert made.covers(
        {"spec": {"replicas": 1, "list": [{"a": 1, "b": 2}], "other": 3}, "status": {}}, wanted
    )
    assert not made.covers({"spec": {"replicas": 2, "list": [{"a": 1}]}}, wanted)
    assert not made.covers({"spec": {"replicas": 1, "list": [{"a": 1}, {"a": 2}]}}, wanted)
