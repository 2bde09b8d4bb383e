"""CI's second look at a failed test: it names what is unstable and hides nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[3] / "tools" / "pytest_twice.py"
SOUND = "def test_sound(): pass\n"
UNSTABLE = """
from pathlib import Path

def test_unstable():
    seen = Path(__file__).with_name("seen")
    if not seen.exists():
        seen.touch()
        raise AssertionError("the first time only")
"""
BROKEN = "def test_broken(): assert False\n"


def _run(folder: Path, text: str, *arguments: str) -> tuple[int, str]:
    (folder / "test_it.py").write_text(text)
    done = subprocess.run(
        [sys.executable, str(TOOL), *arguments, "test_it.py"],
        cwd=folder,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


def test_what_passes_by_itself_is_unstable_and_a_second_failure_counts(tmp_path: Path) -> None:
    unstable = "!!! UNSTABLE, failed once and passed by itself: test_it.py::test_unstable"
    status, output = _run(tmp_path, SOUND + UNSTABLE, "-p", "xdist", "-n", "2")
    assert status == 0
    assert unstable in output
    (tmp_path / "seen").unlink()
    status, output = _run(tmp_path, SOUND + UNSTABLE + BROKEN)
    assert status == 1
    assert unstable in output
    assert "!!! FAILED TWICE: test_it.py::test_broken" in output


def test_many_failures_are_not_run_again(tmp_path: Path) -> None:
    many = "import pytest\n\n@pytest.mark.parametrize('i', range(11))\ndef test_broken(i): assert False\n"
    status, output = _run(tmp_path, many)
    assert status == 1
    assert "11 tests failed: too many to run again" in output


@pytest.mark.parametrize(
    ("text", "status"),
    [(SOUND, 0), ("import nothing_of_this_name\n", 2), ("", 5)],
    ids=["sound", "broken", "empty"],
)
def test_other_ends_are_pytests_own(tmp_path: Path, text: str, status: int) -> None:
    got, output = _run(tmp_path, text)
    assert got == status
    assert "UNSTABLE" not in output
    assert "TWICE" not in output
