"""A wheel has everything, and works from any directory."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import pdserve

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("pdserve", "router", "prefill_worker", "decode_worker", "kv_transfer", "http_door", "deploy")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built the way a user would, from a copy: building leaves traces."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in sources():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(folder), str(source)]
    subprocess.run(command, check=True, timeout=300)
    return next(folder.glob("*.whl"))


def sources() -> list[str]:
    """What the wheel is made from, relative to the root."""
    found = [f"{path.relative_to(ROOT)}" for room in ROOMS for path in sorted((ROOT / room).rglob("*.py*"))]
    return ["pyproject.toml", "README.md", *(name for name in found if not name.endswith(".pyc"))]


@pytest.mark.timeout(400)
def test_every_module_is_in_the_wheel(wheel: Path) -> None:
    packed = set(zipfile.ZipFile(wheel).namelist())
    assert [name for name in sources() if "/" in name and name not in packed] == []
    assert not [name for name in packed if name.startswith(("tests/", "benchmarks/", "proto/", "docs/"))]


@pytest.mark.timeout(400)
def test_an_installed_wheel_runs_from_any_directory(wheel: Path, tmp_path: Path) -> None:
    """The user's current folder has a `router.py` of its own, which is not ours."""
    target, elsewhere = tmp_path / "installed", tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "router.py").write_text("raise RuntimeError('not yours')\n")
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(target), str(wheel)]
    subprocess.run(install, check=True, timeout=300)

    def run(*command: str) -> str:
        environ = {**os.environ, "PYTHONPATH": str(target)}
        done = subprocess.run(
            command, cwd=elsewhere, env=environ, capture_output=True, text=True, timeout=60, check=True
        )
        return done.stdout

    assert "generate" in run(str(target / "bin" / "pdserve"), "--help")
    assert pdserve.__version__ in run(str(target / "bin" / "pdserve"), "version")
    where = run(
        sys.executable, "-P", "-c", "import pdserve, router; print(pdserve.__file__, router.__file__)"
    )
    assert all(str(target) in path for path in where.split())
