"""`pdserve bench`: what a cluster does under a load, as its clients see it; and which of two serves it better."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import math
import os
import platform
import signal
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdserve.bench.compare import compare
from pdserve.bench.drive import LoadDriver, RequestRecord, Run
from pdserve.bench.plan import LoadPlan, PlanOptions, make_plan
from pdserve.bench.plot import plot
from pdserve.bench.report import Objectives, Report, lines_of, make_report
from pdserve.bench.trace import read_trace
from pdserve.cli.progress_bar import CountBar
from pdserve.cli.target import add_target, open_async_client
from pdserve.clock import SystemClock
from pdserve.service.settings import ConfigError

if TYPE_CHECKING:
    from pdserve.client import AsyncClient

DESCRIPTION = """\
Sends requests to a running cluster and prints what its clients saw: time to first token and its parts, time a token,
every gap, rates, and goodput: the requests that met --slo-…, of which refused and failed ones are none.

  pdserve bench --rate 2 --requests 100 --prompt-tokens 512 --output-tokens 64     Poisson arrivals
  pdserve bench --concurrency 8                                                    eight at a time
  pdserve bench --trace benchmarks/traces/azure_llm_2023_conv.csv.gz --length-scale 0.25 --rate-scale 0.5

Traces are Mooncake's JSON lines and Azure's CSV. With --rate or --concurrency only a trace's lengths and prefixes are
used, not its times. Outputs have exactly the planned length.

--compare starts two clusters of this machine, in turns, and says which one serves the load better:
  pdserve bench --compare --model smollm2-135m --rate 1 --slo-ttft-ms 2000 --slo-gap-ms 200
"""
_DEFAULT_OBJECTIVES = Objectives(ttft_s=1.0, gap_s=0.2)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The load, what counts as served well, what is written, and what is compared."""
    add_target(parser)
    load = parser.add_argument_group("load")
    load.add_argument("--trace", type=Path, metavar="F", help="lengths, times and prefixes of this trace")
    load.add_argument("--rate", type=_positive, metavar="R", help="R requests a second, Poisson arrivals")
    load.add_argument("--concurrency", type=_count, metavar="N", help="N requests at a time, whatever comes")
    load.add_argument("--requests", type=_count, metavar="N", help="so many (default 100; of a trace all)")
    load.add_argument(
        "--rate-scale", type=_positive, default=1.0, metavar="F", help="a trace's times, F times faster"
    )
    load.add_argument(
        "--length-scale", type=_positive, default=1.0, metavar="F", help="a trace's lengths, times F"
    )
    load.add_argument(
        "--prompt-tokens", type=_count, default=512, metavar="N", help="without a trace (default 512)"
    )
    load.add_argument(
        "--output-tokens", type=_count, default=64, metavar="N", help="without a trace (default 64)"
    )
    load.add_argument(
        "--shared-prefix", type=_count_or_none, default=0, metavar="N", help="N tokens all prompts begin with"
    )
    load.add_argument(
        "--seed", type=int, default=0, metavar="S", help="equal seeds: equal prompts and arrivals"
    )
    load.add_argument("--timeout", type=_positive, metavar="S", help="deadline of each request, seconds")
    wanted = parser.add_argument_group("objectives, in milliseconds")
    for name, what in (
        ("ttft", "time to first token"),
        ("tpot", "time a token, on average after the first"),
        ("gap", "longest gap between tokens"),
    ):
        wanted.add_argument(f"--slo-{name}-ms", type=_positive, metavar="MS", help=what)
    parser.add_argument("--json", type=Path, metavar="F", help="all figures, and each request, as JSON")
    parser.add_argument("--svg", type=Path, metavar="F", help="a picture of the run")
    compared = parser.add_argument_group("comparison")
    compared.add_argument(
        "--compare", action="store_true", help="an aggregated against a disaggregated cluster"
    )
    compared.add_argument("--model", metavar="M", help="what both serve")
    compared.add_argument("--prefill", type=_count, default=1, metavar="X", help="of the one (default 1)")
    compared.add_argument("--decode", type=_count, default=1, metavar="Y", help="of the one (default 1)")
    compared.add_argument("--both", type=_count, metavar="Z", help="workers of the other (default: X + Y)")
    compared.add_argument(
        "--rounds", type=_count, default=3, metavar="N", help="of each, in turns (default 3)"
    )
    compared.add_argument("--config", type=Path, metavar="F", help="configuration of both")


def run(arguments: argparse.Namespace) -> int:
    """Measure; 0 also if requests failed: the report says so. Raises PdserveError for what can't be run as asked."""
    _check(arguments)
    options = PlanOptions(
        rows=None if arguments.trace is None else read_trace(arguments.trace),
        num_requests=arguments.requests,
        rate=arguments.rate,
        rate_scale=arguments.rate_scale,
        length_scale=arguments.length_scale,
        prompt_tokens=arguments.prompt_tokens,
        output_tokens=arguments.output_tokens,
        shared_prefix=arguments.shared_prefix,
        seed=arguments.seed,
    )
    return asyncio.run(_compare(arguments, options) if arguments.compare else _measure(arguments, options))


def _check(arguments: argparse.Namespace) -> None:
    """Raises ConfigError for flags that don't go together, and files that can't be written."""
    if arguments.rate is not None and arguments.concurrency is not None:
        raise ConfigError("--rate and --concurrency can't both be kept: give one")
    if arguments.trace is arguments.rate is arguments.concurrency is None:
        raise ConfigError("no load: give --rate R, --concurrency N or --trace F")
    if arguments.trace is not None and arguments.shared_prefix:
        raise ConfigError("--shared-prefix: a trace says itself what its prompts share")
    if arguments.trace is None and (arguments.length_scale, arguments.rate_scale) != (1.0, 1.0):
        raise ConfigError("--length-scale and --rate-scale are for a --trace")
    if arguments.compare and arguments.model is arguments.config is None:
        raise ConfigError("--compare starts clusters of its own: give --model or --config")
    if not arguments.compare and not (arguments.model is arguments.config is None):
        raise ConfigError(
            "--model and --config go with --compare: without it the cluster at --target is measured"
        )
    for file in (arguments.json, arguments.svg):
        if file is not None and (file.is_dir() or not os.access(file.absolute().parent, os.W_OK)):
            raise ConfigError(f"{file}: can't be written")


def _objectives(arguments: argparse.Namespace, default: Objectives) -> Objectives:
    given = {
        f"{name}_s": value / 1e3
        for name in ("ttft", "tpot", "gap")
        if (value := getattr(arguments, f"slo_{name}_ms")) is not None
    }
    return Objectives(**given) if given else default


async def _measure(arguments: argparse.Namespace, options: PlanOptions) -> int:
    objectives = _objectives(arguments, Objectives())
    async with open_async_client(arguments) as client:
        model = await client.model()
        plan = make_plan(options, model)
        _say_left_out(plan, model.window_tokens)
        run = await _run(client, plan, arguments)
    report = make_report(run, objectives)
    print("\n".join(lines_of(report)))
    about = {"model": model.model, "target": arguments.target, **_about(arguments, plan)}
    _write(arguments, about, [("", run, report)])
    return 130 if run.was_stopped else 0


async def _compare(arguments: argparse.Namespace, options: PlanOptions) -> int:
    objectives = _objectives(arguments, _DEFAULT_OBJECTIVES)
    both = arguments.both or arguments.prefill + arguments.decode
    shared = [] if arguments.model is None else ["--model", arguments.model]
    shared += [] if arguments.config is None else ["--config", str(arguments.config.absolute())]
    arrangements = {
        f"{both} aggregated": ["--both", str(both)],
        f"{arguments.prefill}P+{arguments.decode}D": [
            *("--prefill", str(arguments.prefill), "--decode", str(arguments.decode))
        ],
    }
    rounds: dict[str, list[Run]] = {name: [] for name in arrangements}
    kept: list[tuple[str, Run, Report]] = []
    for number in range(arguments.rounds):
        for name, flags in arrangements.items():
            sys.stderr.write(f"round {number + 1} of {arguments.rounds}, {name}\n")
            plan, run = await _round([*shared, *flags], options, arguments)
            if run.was_stopped:
                return 130
            report = make_report(run, objectives)
            kept.append((f"{name}, round {number + 1}", run, report))
            rounds[name].append(run)
            print(f"== {name}, round {number + 1}")
            print("\n".join(lines_of(report)) + "\n")
    (first, firsts), (second, seconds) = rounds.items()
    compared = compare(
        [each.outcomes for each in firsts], [each.outcomes for each in seconds], objectives, arguments.seed
    )
    verdict = compared.verdict(first, second)
    print(verdict)
    about = {"model": arguments.model or "", "verdict": verdict, **_about(arguments, plan)}
    _write(arguments, about, kept)
    return 0


async def _round(
    flags: list[str], options: PlanOptions, arguments: argparse.Namespace
) -> tuple[LoadPlan, Run]:
    """A cluster is started, measured, and ended."""
    from deploy.demo.cluster import running_cluster
    from pdserve.client import AsyncClient

    with tempfile.TemporaryDirectory(prefix="pdserve-bench-") as folder:
        async with (
            running_cluster(Path(folder), flags) as cluster,
            AsyncClient(cluster.target) as client,
        ):
            model = await client.model()
            plan = make_plan(options, model)
            _say_left_out(plan, model.window_tokens)
            return plan, await _run(client, plan, arguments)


async def _run(client: AsyncClient, plan: LoadPlan, arguments: argparse.Namespace) -> Run:
    """One run; Ctrl-C ends it early, and what has been measured until then counts."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, stop.set)
    sys.stderr.write(f"{len(plan.requests)} requests, {_pace(arguments)}\n")
    with CountBar(len(plan.requests)) as bar:
        driver = LoadDriver(
            client,
            SystemClock(),
            concurrency=arguments.concurrency,
            timeout_s=arguments.timeout,
            told=lambda outcome: bar.one_more(failed=not outcome.is_ok),
        )
        try:
            return await driver.run(plan.requests, stop)
        finally:
            loop.remove_signal_handler(signal.SIGINT)


def _pace(arguments: argparse.Namespace) -> str:
    if arguments.concurrency is not None:
        return f"{arguments.concurrency} at a time"
    if arguments.rate is not None:
        return f"{arguments.rate:g} a second, Poisson"
    return f"as {arguments.trace} has them" + (
        f", {arguments.rate_scale:g} times as fast" if arguments.rate_scale != 1 else ""
    )


def _say_left_out(plan: LoadPlan, window_tokens: int) -> None:
    if plan.num_left_out:
        sys.stderr.write(
            f"{plan.num_left_out} requests of the trace are left out: they don't fit the window of {window_tokens}"
            " tokens (--length-scale makes them shorter)\n"
        )


def _about(arguments: argparse.Namespace, plan: LoadPlan) -> dict[str, Any]:
    """What somebody needs to run it again, and to judge it."""
    return {
        "command": sys.argv[1:],
        "num_planned": len(plan.requests),
        "num_left_out": plan.num_left_out,
        "seed": arguments.seed,
        "machine": {"cores": os.cpu_count(), "cpu": platform.machine(), "load": os.getloadavg()},
    }


def _write(arguments: argparse.Namespace, about: dict[str, Any], runs: list[tuple[str, Run, Report]]) -> None:
    if arguments.json is not None:
        about["runs"] = [
            {"name": name, **report.to_json(), "each": [_outcome(each) for each in run.outcomes]}
            for name, run, report in runs
        ]
        arguments.json.write_text(json.dumps(about, indent=1) + "\n")
    if arguments.svg is not None:
        name, run, report = runs[-1]
        title = f"{about['model'] or name}: {report.num_sent} requests, goodput {report.goodput:.2f}/s"
        arguments.svg.write_text(plot(run, title))


def _outcome(outcome: RequestRecord) -> dict[str, Any]:
    known = {field.name: getattr(outcome, field.name) for field in dataclasses.fields(outcome)}
    if outcome.timings is not None:
        known["timings"] = dataclasses.asdict(outcome.timings)
    return known


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"want a number above 0, got {text}")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"want a whole number of at least 1, got {text}")
    return value


def _count_or_none(text: str) -> int:
    return 0 if text == "0" else _count(text)
