"""The commands of docs/deploy-kubernetes.md: what can be checked without a cluster is."""

from __future__ import annotations

import base64
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from pdserve.cli.main import build_parser
from pdserve.service.api_keys import read_keys
from tests.support.certificates import Authority, needs_openssl
from tests.support.dockerfile import read_stages
from tests.support.helm import CHART, helm, kubectl, render
from tests.support.processes import run_cli
from tests.support.readme import ROOT

PAGE = (ROOT / "docs" / "deploy-kubernetes.md").read_text(encoding="utf-8")


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)


COMMANDS = [shlex.split(line.removesuffix("&")) for block in blocks("bash") for line in block.splitlines()]


def of(program: str, *words: str) -> list[list[str]]:
    return [each for each in COMMANDS if each[: 1 + len(words)] == [program, *words]]


def test_every_command_is_of_a_kind_that_is_looked_at() -> None:
    assert {each[0] for each in COMMANDS} == {"docker", "helm", "kubectl", "pdserve"}


def test_images_are_targets() -> None:
    _, stages = read_stages((ROOT / "deploy" / "images" / "Dockerfile").read_text(encoding="utf-8"))
    built = of("docker", "build")
    assert all((ROOT / command[command.index("-f") + 1]).is_file() for command in built)
    targets = [command[command.index("--target") + 1] for command in built]
    assert sorted(targets) == ["operator", "ray-node", "router", "worker-cpu", "worker-cuda"]
    assert set(targets) <= set(stages)


def test_pdserve_knows_its_commands() -> None:
    in_pods = [command[command.index("--") + 1 :] for command in of("kubectl", "exec")]
    assert len(in_pods) == 1
    for command in (*of("pdserve"), *in_pods):
        build_parser(command[1:]).parse_args(command[1:])


def test_files_are_there() -> None:
    for command in of("kubectl", "apply"):
        assert (ROOT / command[command.index("-f") + 1]).is_file()


@pytest.mark.slow
@pytest.mark.parametrize(
    "command", [*of("helm", "install"), *of("helm", "upgrade")], ids=lambda command: " ".join(command)[:60]
)
def test_the_chart_takes_these_values(command: list[str], tmp_path: Path) -> None:
    _, _, release, chart, *flags = command
    assert ROOT / chart == CHART
    values: dict[str, Any] = {}
    if "-f" in flags:
        del flags[flags.index("-f") : flags.index("-f") + 2]
        [example] = blocks("yaml")
        values = yaml.safe_load(example)
    done = helm("template", release, str(CHART), *flags, values=values)
    assert done.returncode == 0, done.stderr
    names = {
        f"{each['kind'].lower()}/{each['metadata']['name']}"
        for each in yaml.safe_load_all(done.stdout)
        if each
    }
    if release == "chat":  # what other commands on the page speak of
        assert {
            "deployment/chat-pdserve-router",
            "deployment/chat-pdserve-decode",
            "service/chat-pdserve",
        } <= names
        spoken = {
            word
            for line in of("kubectl")
            for word in line
            if word.startswith(("deployment/", "service/chat"))
            and ("gateway" not in word or "gateway.replicas=2" in flags)
        }
        assert spoken <= names


@pytest.mark.slow
@needs_openssl
def test_its_secrets_have_what_the_pods_read(tmp_path: Path) -> None:
    """As kubectl makes them from files that pdserve and openssl have made; and pdserve reads the keys back."""
    [keys_add] = of("pdserve", "keys", "add")
    added = run_cli(*[word.replace("keys.toml", str(tmp_path / "keys.toml")) for word in keys_add[1:]])
    assert added.returncode == 0, added.stderr
    Authority(tmp_path, "cluster-ca").sign("chat-pdserve.llm.svc", "router")
    made = {}
    for command in of("kubectl", "create", "secret"):
        done = kubectl(*command[1:], "--dry-run=client", "-o", "json", folder=tmp_path)
        assert done.returncode == 0, done.stderr
        secret = yaml.safe_load(done.stdout)
        made[secret["metadata"]["name"]] = secret["data"]
    (tmp_path / "copy.toml").write_bytes(base64.b64decode(made["keys"]["keys.toml"]))
    assert [each.tenant for each in read_keys(tmp_path / "copy.toml").values()] == ["acme"]

    [example] = blocks("yaml")
    manifests = render(yaml.safe_load(example))
    drawn = {each["metadata"]["name"] for each in manifests if each["kind"] == "Secret"}
    for each in manifests:
        if each["kind"] == "Deployment":
            for volume in each["spec"]["template"]["spec"]["volumes"]:
                source = volume.get("secret", {"secretName": ""})
                if source["secretName"] and source["secretName"] not in drawn:
                    wanted = [item["key"] for item in source.get("items", [])] or ["tls.crt", "tls.key"]
                    assert set(wanted) <= set(made[source["secretName"]])
