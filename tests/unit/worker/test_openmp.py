"""Compute threads give their core away soon, unless the user wants it otherwise."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pdserve.openmp import wait_briefly

_LOAD = """
import ctypes, os, sys
from pdserve.openmp import wait_briefly
wait_briefly(os.environ)
ctypes.CDLL(sys.argv[1])
"""


@pytest.mark.parametrize("own", [{"GOMP_SPINCOUNT": "7"}, {"OMP_WAIT_POLICY": "active"}])
def test_what_the_user_has_set_stays(own: dict[str, str]) -> None:
    environ = dict(own)
    wait_briefly(environ)
    assert environ == own


def test_torchs_runtime_takes_it_from_the_running_process() -> None:
    torch = importlib.util.find_spec("torch")
    assert torch is not None and torch.origin is not None
    found = sorted(Path(torch.origin).parent.glob("lib/libgomp*.so*"))
    if not found:
        pytest.skip("this torch brings no libgomp")
    own = {name: value for name, value in os.environ.items() if not name.startswith(("GOMP_", "OMP_"))}
    told = subprocess.run(
        [sys.executable, "-c", _LOAD, str(found[0])],
        env=own | {"OMP_DISPLAY_ENV": "verbose"},
        stderr=subprocess.PIPE,
        text=True,
        check=True,
    ).stderr
    assert "GOMP_SPINCOUNT = '10000'" in told
