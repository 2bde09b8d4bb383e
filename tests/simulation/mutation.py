"""Copies of the packages with one rule taken out each: the simulation must notice.

A patch file is a unified diff. Line numbers in it don't count: each hunk's old lines must stand in the file exactly
once, so a patch fails as soon as the code that it is about has changed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PATCHES = Path(__file__).parent / "mutants"
PACKAGES = ("decode_worker", "deploy", "http_door", "kv_transfer", "pdserve", "prefill_worker", "router")
TESTS = ("__init__.py", "simulation", "support")


class PatchFailed(Exception):
    """The code that a patch is about isn't there any more."""


@dataclass(frozen=True, slots=True)
class Hunt:
    """What came of a hunt. output: of the child process."""

    found: bool
    output: str


def patches() -> list[str]:
    """Names of all mutants."""
    return sorted(path.stem for path in PATCHES.glob("*.patch"))


def mutate(name: str, folder: Path) -> None:
    """Put a copy of the packages with this mutant's patch applied into an empty folder. Raises PatchFailed."""
    ignore = shutil.ignore_patterns("__pycache__", "*.pyc")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, folder / package, ignore=ignore)
    for part in TESTS:
        source = ROOT / "tests" / part
        if source.is_dir():
            shutil.copytree(source, folder / "tests" / part, ignore=ignore)
        elif source.exists():
            shutil.copy(source, folder / "tests" / part)
    apply_patch((PATCHES / f"{name}.patch").read_text(), folder)


def hunt(folder: Path, num_seeds: int, num_processes: int, first: int = 0) -> Hunt:
    """Simulate a mutated copy until it shows, at most so many seeds."""
    arguments = [
        "--first",
        str(first),
        "--seeds",
        str(num_seeds),
        "--processes",
        str(num_processes),
        "--brief",
    ]
    return run_in(folder, "tests.simulation", arguments)


def run_in(folder: Path, module: str, arguments: Sequence[str]) -> Hunt:
    """Run a module of a mutated copy; found: it ended with exit code 1."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{module} ended with {done.returncode}:\n{done.stdout[-4000:]}")
    return Hunt(done.returncode == 1, done.stdout)


# --- patches


def apply_patch(patch: str, folder: Path) -> None:
    """Apply a unified diff (paths with one leading folder, as git writes them) below a folder."""
    path: Path | None = None
    lines = patch.splitlines()
    index = 0
    while index < len(lines):
        line = lines[index]
        index += 1
        if line.startswith("+++ "):
            path = folder / line.removeprefix("+++ ").split("\t")[0].partition("/")[2]
        elif line.startswith("@@"):
            if path is None:
                raise PatchFailed("a hunk without a file")
            begin = index
            while index < len(lines) and lines[index][:1] in (" ", "+", "-", ""):
                index += 1
            _apply_hunk(lines[begin:index], path)
    if path is None:
        raise PatchFailed("an empty patch")


def _apply_hunk(hunk: Sequence[str], path: Path) -> None:
    hunk = [line or " " for line in hunk]
    while hunk and hunk[-1] == " ":
        hunk = hunk[:-1]
    old = "".join(line[1:] + "\n" for line in hunk if line[0] in " -")
    new = "".join(line[1:] + "\n" for line in hunk if line[0] in " +")
    text = path.read_text() if path.exists() else ""
    if text.count(old) != 1:
        raise PatchFailed(f"{path.name} has these lines {text.count(old)} times:\n{old}")
    path.write_text(text.replace(old, new))
