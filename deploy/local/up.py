"""Assembles the supervisor of `pdserve up` from settings."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from deploy.local.output import FolderOutput, Output, PrefixedOutput
from deploy.local.plan import Plan, Shape, make_plan
from deploy.local.ports import PortReservations
from deploy.local.probe import fetch
from deploy.local.restarts import RestartPolicy
from deploy.local.supervisor import Supervisor
from pdserve.clock import SystemClock
from pdserve.service.config import Config
from pdserve.service.lifecycle import EXIT_SUPERSEDED, EXIT_USAGE


@dataclass(frozen=True, slots=True, kw_only=True)
class UpOptions:
    """What `pdserve up` was asked for.

    config       effective configuration, of which the supervisor itself uses a few values
    config_file  given on to the children, with `flags` ("table.key" → value) on top
    log_dir      folder for the children's output; None = on standard error, under prefixes
    """

    shape: Shape
    config: Config
    config_file: Path | None = None
    flags: Mapping[str, object] = field(default_factory=dict)
    ready_file: Path | None = None
    log_dir: Path | None = None


def run_up(options: UpOptions) -> str | None:
    """Serve until a signal; blocks. Returns what went wrong in one line, or None. Main thread only.

    Raises ConfigError for what can't be started as asked, OSError if the log folder can't be made.
    """
    with contextlib.ExitStack() as stack:
        ports = stack.enter_context(PortReservations())
        plan = make_plan(
            options.shape,
            options.config,
            config_file=options.config_file,
            flags=options.flags,
            cores=usable_cores(),
            environ=os.environ,
            reserve=ports.reserve,
        )
        output: Output
        if options.log_dir is None:
            output = PrefixedOutput(sys.stderr, max(len(spec.id) for spec in plan.processes))
        else:
            output = stack.enter_context(FolderOutput(options.log_dir))
        return asyncio.run(_supervise(options, plan, output))


async def _supervise(options: UpOptions, plan: Plan, output: Output) -> str | None:
    engine = options.config.engine
    model = options.config.worker.model if engine.kind == "torch" else "the fake engine"
    serves_alone = options.shape.num_both > 0 or options.config.router.allow_local_prefill
    supervisor = Supervisor(
        plan,
        policy=RestartPolicy(final_exits=FINAL_EXITS),
        output=output,
        say=_say,
        title=f"{model} on {options.shape}",
        ready_file=options.ready_file,
        drain_s=options.config.timeouts.drain_s,
        clock=SystemClock(),
        extra_ready=_at_once if serves_alone else can_serve,
    )
    return await supervisor.run()


def _say(line: str) -> None:
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.write(line + "\n")
        sys.stdout.flush()


# What a new start would not change.
FINAL_EXITS = {
    EXIT_USAGE: "it was started wrongly",
    EXIT_SUPERSEDED: "another process has its id",
}


async def can_serve(plan: Plan) -> bool:
    """Whether the router has a pair that can take a request, as its metrics say."""
    answer = await fetch(plan.router.metrics, "/metrics")
    return answer is not None and gauge(answer[1], "pdserve_pairs_up") >= 1


def gauge(text: str, name: str) -> float:
    """The value of a gauge without labels in Prometheus text; 0 if it isn't there."""
    for line in text.splitlines():
        if line.startswith(name + " "):
            return float(line.split()[1])
    return 0.0


async def _at_once(plan: Plan) -> bool:
    return True  # one worker alone serves


def usable_cores() -> list[int]:
    """CPU numbers that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))
