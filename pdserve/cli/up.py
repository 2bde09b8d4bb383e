"""`pdserve up`: a cluster on this machine, all processes under one supervisor."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pdserve.cli.settings import UP, add_settings, given_settings, read_settings
from pdserve.errors import Incompatible
from pdserve.service.config import Config
from pdserve.service.exposure import check_router, check_worker
from pdserve.service.settings import ConfigError

if TYPE_CHECKING:
    from deploy.scaling.targets import Range, ScalingTargets
    from pdserve.service.scaling_config import ScalingConfig

DESCRIPTION = """\
Starts a router, prefill and decode workers as child processes, restarts what dies, and drains them on SIGTERM or Ctrl-C
(a second one ends them at once). Prints one line when it is ready to serve. Every configuration setting is also a flag,
which all children get. In a terminal it shows a line for each process, a progress bar while models load, and only the
warnings of the children's logs; --log.level info or --log-dir keeps the rest.
With a range (--prefill 1..3 --decode 1..4) workers are started and drained, or change their role, to meet --ttft-target
and --itl-target; each change is printed with its reason.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What is to be started; the settings behind it."""
    for role in ("prefill", "decode"):
        parser.add_argument(
            f"--{role}",
            metavar="X[..Y]",
            help=f"{role} workers (without any number: 1); X..Y: as many of these as the load asks for",
        )
    parser.add_argument("--both", metavar="Z", help="workers that do both")
    parser.add_argument(
        "--ready-file", type=Path, metavar="F", help="JSON with addresses and pids, once ready"
    )
    parser.add_argument(
        "--log-dir",
        type=Path,
        metavar="DIR",
        help="one log file per process, instead of prefixed lines on stderr",
    )
    add_settings(parser, UP)


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal; the exit code. Raises PdserveError for what can't be started as asked."""
    from deploy.local.plan import Shape
    from deploy.local.up import UpOptions, run_up

    is_terminal = sys.stderr.isatty()
    is_quiet = is_terminal and arguments.log_dir is None
    config = read_settings(arguments, UP, defaults={"log.level": "warning"} if is_quiet else None)
    prefill, decode, both = ranges_of(arguments)
    options = UpOptions(
        shape=Shape(num_prefill=prefill.least, num_decode=decode.least, num_both=both),
        scaled=scaled(prefill, decode, both, config.scaling),
        config=config,
        config_file=None if arguments.config is None else arguments.config.absolute(),
        flags={"log.level": config.log.level, **given_settings(arguments, UP)},
        ready_file=None if arguments.ready_file is None else arguments.ready_file.absolute(),
        log_dir=arguments.log_dir,
        is_terminal=is_terminal,
    )
    check_router(config, has_secret=True)  # its own, if no other is set
    check_worker(config, has_secret=True)
    _check_ready_file(options.ready_file)
    _check_model(config)
    fault = run_up(options)
    if fault is not None:
        sys.stderr.write(f"error: {fault}\n")
        return 1
    return 0


def ranges_of(arguments: argparse.Namespace) -> tuple[Range, Range, int]:
    """Prefill, decode and both workers; one prefill and one decode worker if no number was given.

    Raises ConfigError that names the flag.
    """
    if arguments.prefill is arguments.decode is arguments.both is None:
        return _range("--prefill", "1"), _range("--decode", "1"), 0
    prefill, decode, both = (
        _range(f"--{role}", "0" if (text := getattr(arguments, role)) is None else text)
        for role in ("prefill", "decode", "both")
    )
    if not both.is_fixed:
        raise ConfigError(f"--both: want a number, got {both}: workers that do both aren't scaled")
    return prefill, decode, both.least


def scaled(prefill: Range, decode: Range, both: int, how: ScalingConfig) -> ScalingTargets | None:
    """What the numbers of workers are to keep; None: they are fixed. Raises ConfigError for what can't be scaled."""
    if prefill.is_fixed and decode.is_fixed:
        return None
    if both:
        raise ConfigError("--both can't stand beside a range: workers that do both aren't scaled")
    from deploy.scaling.targets import ScalingTargets

    return ScalingTargets(prefill=prefill, decode=decode, how=how)


def _range(flag: str, text: str) -> Range:
    from deploy.scaling.targets import Range

    try:
        return Range.parse(text)
    except ConfigError as error:
        raise ConfigError(f"{flag}: {error}") from error


def _check_ready_file(file: Path | None) -> None:
    """It is written only when everything runs: say now that it can't be."""
    if file is None:
        return
    if not file.parent.is_dir():
        raise ConfigError(f"--ready-file {file}: no folder {file.parent}")
    if file.is_dir() or not os.access(file.parent, os.W_OK):
        raise ConfigError(f"--ready-file {file}: can't be written")


def _check_model(config: Config) -> None:
    """Fail here, in one line, rather than in each child."""
    if config.engine.kind == "fake":
        return
    if not config.worker.model:
        raise ConfigError(
            "no model: give --model an alias (pdserve fetch), a Hugging Face folder or a .gguf file"
        )
    from pdserve.modelstore import resolve
    from pdserve.modelstore.model_facts import read_facts

    folder = resolve(config.worker.model)
    read_facts(folder)
    # The engine's own rules need torch, which this process must not hold for as long as the cluster runs.
    inspect = [sys.executable, "-m", "pdserve.cli", "model", "inspect", "--json", str(folder)]
    inspected = subprocess.run(inspect, capture_output=True, text=True, check=False)
    if inspected.returncode:
        raise Incompatible(inspected.stderr.strip().rpartition("\n")[2].removeprefix("error: "))
