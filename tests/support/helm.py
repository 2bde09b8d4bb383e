"""The chart, rendered by the real helm, where `make k8s-tools` has fetched it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.readme import ROOT
from tools.k8s_tools import PROGRAMS, SCHEMAS, tools_dir

CHART = ROOT / "deploy" / "k8s" / "chart"
OPERATOR_CHART = ROOT / "deploy" / "k8s" / "operator-chart"
# The least that renders: no model, and nobody to be kept out.
SIMPLEST: Mapping[str, Any] = {"insecure": True, "config": {"engine": {"kind": "fake"}}}

Manifest = dict[str, Any]


def tool_folder(folder: str) -> Path:
    """Skips the test if it isn't there."""
    found = tools_dir() / folder
    if not found.is_dir():
        pytest.skip(f"{found} isn't there: `make k8s-tools` fetches it")
    return found


def helm(*arguments: str, values: Mapping[str, Any] = SIMPLEST) -> subprocess.CompletedProcess[str]:
    """One call, with these values beside the chart's own."""
    program = tool_folder(PROGRAMS.folder) / "helm"
    return subprocess.run(
        [str(program), *arguments, "--values", "-"],
        input=yaml.safe_dump(dict(values)),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def kubectl(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """One call that needs no cluster, in a folder."""
    program = tool_folder(PROGRAMS.folder) / "kubectl"
    return subprocess.run(
        [str(program), *arguments], cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )


def render(
    values: Mapping[str, Any] = SIMPLEST,
    *,
    chart: Path = CHART,
    release: str = "chat",
    namespace: str = "llm",
) -> list[Manifest]:
    """All manifests, but for the kinds of crds/."""
    done = helm("template", release, str(chart), "--namespace", namespace, values=values)
    assert done.returncode == 0, done.stderr
    return [each for each in yaml.safe_load_all(done.stdout) if each]


def refusal(values: Mapping[str, Any], *, chart: Path = CHART) -> str:
    """What helm says against these values, in one line."""
    done = helm("template", "chat", str(chart), values=values)
    assert done.returncode != 0, done.stdout[:2000]
    return " ".join(done.stderr.split())


def one(manifests: Sequence[Manifest], kind: str, name: str) -> Manifest:
    """The one of that kind and name."""
    [found] = [each for each in manifests if each["kind"] == kind and each["metadata"]["name"] == name]
    return found


def validate(folder: Path, manifests: Sequence[Manifest], version: str) -> None:
    """kubernetes-validate --strict: fails with all that it says.

    folder  for a file with the manifests
    """
    schemas = tool_folder(SCHEMAS.folder)
    file = folder / "manifests.yaml"
    file.write_text(yaml.safe_dump_all(manifests))
    command = [
        sys.executable,
        "-m",
        "kubernetes_validate",
        "--strict",
        "--kubernetes-version",
        version,
        str(file),
    ]
    done = subprocess.run(
        command, env={"PYTHONPATH": str(schemas)}, capture_output=True, text=True, timeout=120, check=False
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert said.count("INFO") >= len(manifests), said  # each was looked at
