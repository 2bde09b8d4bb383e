"""`pdserve operator`: what it says where it can't run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pdserve.cli.main import main


def run(code: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_without_the_extra_one_line_says_what_to_install() -> None:
    code = "import sys; sys.modules['kopf'] = None; from pdserve.cli.main import main; sys.exit(main(['operator']))"
    done = run(code)
    assert (done.returncode, done.stderr) == (
        2,
        "error: the operator needs the extra k8s: pip install 'pdserve[k8s]'\n",
    )


def test_without_a_cluster_one_line_says_where_it_looked(tmp_path: Path) -> None:
    code = "import sys; from pdserve.cli.main import main; sys.exit(main(['operator']))"
    for kubeconfig in ("", str(tmp_path / "none")):
        done = run(code, KUBECONFIG=kubeconfig, HOME=str(tmp_path))
        assert done.returncode == 2
        assert done.stderr.count("\n") == 1
        assert ("none" if kubeconfig else "KUBECONFIG") in done.stderr


def test_a_resync_of_nothing_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["operator", "--resync", "0"]) == 2
    assert "--resync must be above 0" in capsys.readouterr().err
