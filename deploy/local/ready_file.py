"""The ready file: where a script finds the router and the pids of a local cluster."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from deploy.local.plan import ClusterPlan


@dataclass(frozen=True, slots=True)
class ProcessRow:
    """One child as the ready file names it."""

    role: str
    id: str
    pid: int
    metrics: str


def write_ready_file(path: Path, plan: ClusterPlan, processes: Sequence[ProcessRow]) -> None:
    """Replace the file in one step: a reader sees the old content or the new, never a part.

    Raises OSError.
    """
    content = {
        "router": plan.target,
        "http": plan.http,
        "operators": plan.operators,
        "secret_file": plan.secret_file,
        "processes": [asdict(row) for row in processes],
    }
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    scratch.replace(path)


def remove_ready_file(path: Path) -> None:
    """Remove it when nothing is ready any longer; no error if it is gone already."""
    path.unlink(missing_ok=True)
