"""Clients of the field as the package index has them, in virtual environments of their own beside ours.

`make test-http-clients`, `make test-aiperf` and `make test-guidellm` install them; the Makefile has their versions.
"""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 500.0
# Nothing of this machine's network is there for them: they would wait for what can't be reached.
ALONE = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "NO_PROXY": "127.0.0.1",
}


@dataclass(frozen=True, slots=True)
class ForeignClients:
    """One environment: `.venv-NAME`, made by `make TARGET`."""

    name: str
    target: str

    @property
    def needed(self) -> pytest.MarkDecorator:
        """Skips what needs it where it isn't."""
        ready = (self._folder / ".installed").exists()
        return pytest.mark.skipif(not ready, reason=f"make {self.target} installs {self._folder.name}")

    def run(self, program: str, *words: str, folder: Path, env: dict[str, str] | None = None) -> str:
        """Its standard output; AssertionError with what it said if it fails. `folder` is where it runs."""
        done = subprocess.run(
            [str(self._folder / "bin" / program), *words],
            cwd=folder,
            env={**os.environ, **ALONE, **(env or {})},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout

    @property
    def _folder(self) -> Path:
        return ROOT / f".venv-{self.name}"


SMALL = ForeignClients("clients", "test-http-clients")
AIPERF = ForeignClients("aiperf", "test-aiperf")
GUIDELLM = ForeignClients("guidellm", "test-guidellm")
