"""The command line and the environment of one pdserve process, the same for every way to start it."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

import pdserve
from pdserve.service.config import SETTINGS, EngineConfig

# -P: a `router/` or `deploy.py` in the user's current folder is not ours.
PROGRAM = (sys.executable, "-P", "-m", "pdserve.cli")

_FLAGS = {key.name: key.flag for key in SETTINGS}
# Weights on huge pages, since each token reads all of them (docs/performance.md, "What to set"). glibc takes it from
# the environment only, before the program begins.
_HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


def arguments_of(
    role: str, values: Mapping[str, object], config_file: Path | str | None = None
) -> tuple[str, ...]:
    """What follows the program: the command of a role, and its settings.

    role    router, prefill, decode or both
    values  "table.key" → value, above the file and the environment
    """
    settings = {**values, "worker.role": role} if role == "both" else values
    arguments = ["worker" if role == "both" else role]
    if config_file is not None:
        arguments += ["--config", str(config_file)]
    return (*arguments, *(f"{_FLAGS[name]}={_as_text(value)}" for name, value in settings.items()))


def environ_of(role: str, engine: EngineConfig, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process in a role: the given one, unbuffered, and with the same copy of the package.

    What is set already stands above what is set here.
    """
    root = Path(pdserve.__file__).resolve().parents[1]
    paths = [path for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if (root / "pyproject.toml").exists() and str(root) not in paths:  # a checkout, maybe not installed
        paths.insert(0, str(root))
    has_weights = role in ("prefill", "decode", "both") and engine.kind == "torch"
    made = {**(_HUGE_PAGES if has_weights else {}), **environ, "PYTHONUNBUFFERED": "1"}
    if paths:
        made["PYTHONPATH"] = os.pathsep.join(paths)
    return made


def _as_text(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple | list):
        return ",".join(str(part) for part in value)
    return str(value)
