"""As PID 1 of a container, for which the kernel does nothing that a process hasn't asked for itself."""

from __future__ import annotations

import os
from pathlib import Path

from tests.support.containers import python_as_pid_one


def test_a_start_can_be_ended(tmp_path: Path) -> None:
    """Before anything serves: a pod that is deleted then would else be killed at the end of its grace only."""
    config = tmp_path / "config.toml"
    os.mkfifo(config)
    with (
        python_as_pid_one(
            tmp_path / "log", "-P", "-m", "pdserve.cli", "router", "--config", str(config)
        ) as process,
        config.open("wb"),
    ):  # it is open once the process reads it, and has got nothing yet
        process.terminate()
        assert process.wait() == 128 + 15, process.tail()
