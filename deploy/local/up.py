"""Assembles the supervisor of `pdserve up` from settings."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from deploy.local.output import FolderOutput, PrefixedOutput, ProcessOutput
from deploy.local.plan import ClusterPlan, Layout, Shape
from deploy.local.ports import PortReservations
from deploy.local.probe import fetch, gauge
from deploy.local.restarts import RestartPolicy
from deploy.local.screen import PlainScreen, Screen, TerminalScreen
from deploy.local.supervisor import Supervisor
from deploy.scaling.targets import ScalingTargets
from pdserve.clock import SystemClock
from pdserve.ids import system_random
from pdserve.service.config import Config
from pdserve.service.http_config import has_http
from pdserve.service.lifecycle import EXIT_SUPERSEDED, EXIT_USAGE
from pdserve.service.local_secret import drawn_secret
from pdserve.service.logs import set_up_logs


@dataclass(frozen=True, slots=True, kw_only=True)
class UpOptions:
    """What `pdserve up` was asked for.

    config       effective configuration, of which the supervisor itself uses a few values
    config_file  given on to the children, with `flags` ("table.key" → value) on top
    log_dir      folder for the children's output; None = on standard error, under prefixes
    scaled       what the numbers of workers follow; None = they stay those of the shape
    is_terminal  whether standard error is one: then a person looks on, who wants few lines
    """

    shape: Shape
    config: Config
    config_file: Path | None = None
    flags: Mapping[str, object] = field(default_factory=dict)
    ready_file: Path | None = None
    log_dir: Path | None = None
    scaled: ScalingTargets | None = None
    is_terminal: bool = False


def run_up(options: UpOptions) -> str | None:
    """Serve until a signal; blocks. Returns what went wrong in one line, or None. Main thread only.

    Raises ConfigError for what can't be started as asked, OSError if the log folder can't be made.
    """
    with contextlib.ExitStack() as stack:
        ports = stack.enter_context(PortReservations())
        layout = Layout(
            options.shape,
            options.config,
            config_file=options.config_file,
            flags=options.flags,
            cores=usable_cores(),
            environ=os.environ,
            reserve=ports.reserve,
            draw_secret=lambda port: stack.enter_context(drawn_secret(port, system_random())),
            num_seats=0 if options.scaled is None else options.scaled.most,
            has_http=has_http(),
        )
        width = max(len(spec.id) for spec in layout.plan.processes)
        terminal = stack.enter_context(TerminalScreen(sys.stderr, width)) if options.is_terminal else None
        output: ProcessOutput
        if options.log_dir is not None:
            output = stack.enter_context(FolderOutput(options.log_dir))
        else:
            output = terminal or PrefixedOutput(sys.stderr, width)
        return asyncio.run(_supervise(options, layout, output, terminal or PlainScreen(output)))


async def _supervise(options: UpOptions, layout: Layout, output: ProcessOutput, screen: Screen) -> str | None:
    engine, clock, scaled = options.config.engine, SystemClock(), options.scaled
    model = options.config.worker.model if engine.kind == "torch" else "the fake engine"
    serves_alone = options.shape.num_both > 0 or options.config.router.allow_local_prefill
    supervisor = Supervisor(
        layout.plan,
        policy=RestartPolicy(
            final_exits={EXIT_SUPERSEDED: "another process has its id"},
            final_starts={EXIT_USAGE: "it can't start with these settings"},
        ),
        output=output,
        screen=screen,
        title=f"{model} on {options.shape}" + (f", scaled within {scaled}" if scaled else ""),
        ready_file=options.ready_file,
        drain_s=options.config.timeouts.drain_s,
        clock=clock,
        extra_ready=_at_once if serves_alone else can_serve,
    )
    if scaled is None:
        return await supervisor.run()
    scale_workers = _import_scaling(options.config)
    async with asyncio.TaskGroup() as group:
        scaling = group.create_task(scale_workers(supervisor, layout, scaled, options.config, screen, clock))
        fault = await supervisor.run()
        scaling.cancel()
    return fault


def _import_scaling(config: Config) -> Callable[..., Coroutine[None, None, None]]:
    """gRPC is loaded only where it is needed; its own work at a fork could end a child before it is a program."""
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
    from deploy.local.scaling import scale_workers

    set_up_logs(config.log)
    return scale_workers


async def can_serve(plan: ClusterPlan) -> bool:
    """Whether the router has a pair that can take a request, as its metrics say."""
    answer = await fetch(plan.router.metrics, "/metrics")
    return answer is not None and gauge(answer[1], "pdserve_pairs_up") >= 1


async def _at_once(plan: ClusterPlan) -> bool:
    return True  # one worker alone serves


def usable_cores() -> list[int]:
    """CPU numbers that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))
