"""The commands and the example of docs/kubernetes-operator.md: what can be checked without a cluster is."""

from __future__ import annotations

import re
import shlex

import pytest
import yaml

from deploy.k8s.operator.spec import read_spec
from pdserve.cli.main import build_parser
from tests.support.crd_schemas import problems
from tests.support.helm import OPERATOR_CHART, helm
from tests.support.readme import ROOT

PAGE = (ROOT / "docs" / "kubernetes-operator.md").read_text(encoding="utf-8")
COMMANDS = [
    shlex.split(line.removesuffix("&"))
    for block in re.findall(r"^```bash\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)
    for line in block.splitlines()
]


def test_every_command_is_of_a_kind_that_is_looked_at() -> None:
    assert {each[0] for each in COMMANDS} == {"helm", "kubectl", "pdserve"}
    inline = re.findall(r"`(pdserve operator --[^`]*|pdserve generate [^`]*)`", PAGE)
    for command in ([each for each in COMMANDS if each[0] == "pdserve"]) + [
        shlex.split(each) for each in inline
    ]:
        build_parser(command[1:]).parse_args(command[1:])


@pytest.mark.slow
def test_the_operators_chart_takes_these_values() -> None:
    (command,) = [each for each in COMMANDS if each[0] == "helm"]
    _, verb, release, chart, *flags = command
    assert (verb, ROOT / chart) == ("install", OPERATOR_CHART)
    done = helm("template", release, str(OPERATOR_CHART), *flags, values={})
    assert done.returncode == 0, done.stderr
    assert 'image: "registry.example/pdserve-operator:0.1.0"' in done.stdout


def test_the_example_is_a_service() -> None:
    (example,) = re.findall(r"^```yaml\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)
    service = yaml.safe_load(example)
    crd = yaml.safe_load((OPERATOR_CHART / "crds" / "disaggregatedservices.yaml").read_text())
    (version,) = crd["spec"]["versions"]
    assert problems(version["schema"]["openAPIV3Schema"], service) == []
    spec = read_spec(service["spec"])
    assert spec.is_scaled and spec.num_routers == 2
    # What else the page's commands name.
    assert service["metadata"]["name"] in {word.rpartition("/")[2] for each in COMMANDS for word in each}
