"""Runs steps one after the other, each in its own process and time, and writes what they found after each."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pdserve.clock import Clock, SystemClock

ROOT = Path(__file__).parents[2]
_TAIL_CHARS = 3000
_LEAST_S = 5.0  # a step that has less isn't begun
_DOUBLES = {"PDSERVE_NCCL": "double", "PDSERVE_CUDA_IPC": "double"}


@dataclass(frozen=True, slots=True)
class CheckStep:
    """name: as the report has it. arguments: of `python -m scripts.gpu`, the kind of step first."""

    name: str
    arguments: tuple[str, ...]
    limit_s: float
    environ: Mapping[str, str] = field(default_factory=dict)


def main(steps: Sequence[CheckStep], description: str, arguments: Sequence[str] | None = None) -> int:
    """The command line of both scripts. Returns the exit code: 1 if a step failed, or wasn't begun."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--budget", type=float, default=480.0, metavar="S", help="seconds for all (default 480)"
    )
    parser.add_argument("--json", type=Path, metavar="F", help="what was found; written after each step")
    parser.add_argument("--only", action="append", metavar="STEP", help="only these, by name")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="every step without a GPU: a small model on the CPU, doubles of the links",
    )
    options = parser.parse_args(arguments)
    known = [step.name for step in steps]
    if wrong := [name for name in options.only or () if name not in known]:
        parser.error(f"--only: no step {', '.join(wrong)}; there are {', '.join(known)}")
    wanted = [step for step in steps if options.only is None or step.name in options.only]
    report = _Report(options.json, options.budget, is_dry=options.dry_run)
    clock = SystemClock()
    end_s = clock.now_s() + options.budget
    with tempfile.TemporaryDirectory(prefix="gpu-check") as folder:
        for step in wanted:
            limit_s = options.budget if options.dry_run else step.limit_s  # a busy machine is no slow GPU
            left_s = min(limit_s, end_s - clock.now_s())
            report.add(_run(step, left_s, Path(folder), clock, is_dry=options.dry_run))
    return 0 if report.is_good else 1


class _Report:
    """path: None = nowhere but the terminal."""

    def __init__(self, path: Path | None, budget_s: float, *, is_dry: bool) -> None:
        self._path = path
        self._steps: list[dict[str, Any]] = []
        began = datetime.now(UTC).isoformat(timespec="seconds")
        self._head = {"date": began, "budget_s": budget_s, "dry_run": is_dry}

    @property
    def is_good(self) -> bool:
        return all(step["ok"] for step in self._steps)

    def add(self, found: dict[str, Any]) -> None:
        self._steps.append(found)
        mark = "ok  " if found["ok"] else "FAIL"
        told = found["found"] if found["ok"] else found["error"].strip().splitlines()[-1:]
        print(f"{mark} {found['step']} ({found['took_s']:.1f} s): {json.dumps(told)}", flush=True)
        if self._path is not None:
            self._path.write_text(json.dumps({**self._head, "steps": self._steps}, indent=1) + "\n")


def _run(step: CheckStep, limit_s: float, folder: Path, clock: Clock, *, is_dry: bool) -> dict[str, Any]:
    """One step, and all processes that it started, are over when this returns."""
    began_s = clock.now_s()
    found: dict[str, Any] = {"step": step.name, "ok": False, "took_s": 0.0, "limit_s": round(limit_s, 1)}
    if limit_s < _LEAST_S:
        return found | {"error": "not begun: the budget is used up"}
    out = folder / f"{step.name}.json"
    line = [sys.executable, "-m", "scripts.gpu", *step.arguments, "--out", str(out), "--folder", str(folder)]
    environ = {**os.environ, **step.environ, **(_DOUBLES if is_dry else {})}
    log = folder / f"{step.name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            line + ["--dry-run"] * is_dry,
            cwd=ROOT, env=environ, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
        error = ""
        try:
            if process.wait(limit_s):
                error = f"exit code {process.returncode}"
        except subprocess.TimeoutExpired:
            error = f"not done within {limit_s:.0f} s"
        finally:
            with suppress(ProcessLookupError):  # none of its processes is left
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    found["took_s"] = round(clock.now_s() - began_s, 2)
    if out.exists():
        found["found"] = json.loads(out.read_text())
    if error:
        return found | {"error": f"{log.read_text(errors='replace')[-_TAIL_CHARS:]}\n{error}"}
    return found | {"ok": True}
