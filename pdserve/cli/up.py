"""`pdserve up`: a cluster on this machine, all processes under one supervisor."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from pdserve.service.config import Config, add_flags, flags_of, load
from pdserve.service.settings import ConfigError

HELP = "start a router and workers on this machine"
DESCRIPTION = """\
Starts a router, prefill and decode workers as child processes, starts again what dies, and drains them on SIGTERM or
Ctrl-C. Prints one line when requests will be served. Every setting of the configuration is a flag as well; all
children get it.
"""
# Short flags and the settings they stand for.
_SHORT = {
    "model": "worker.model",
    "listen": "router.listen",
    "dtype": "engine.dtype",
    "deterministic": "engine.deterministic",
    "threads": "engine.threads",
    "engine": "engine.kind",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """All flags of the command; the settings behind them last."""
    parser.add_argument("--model", metavar="M", help="fetched alias, Hugging Face folder, or .gguf file")
    parser.add_argument("--prefill", type=int, metavar="X", help="prefill workers (without any number: 1)")
    parser.add_argument("--decode", type=int, metavar="Y", help="decode workers (without any number: 1)")
    parser.add_argument("--both", type=int, metavar="Z", help="workers that do both")
    parser.add_argument("--listen", metavar="HOST:PORT", help="the router's address; port 0 = a free one")
    parser.add_argument("--dtype", metavar="T", help="auto, bfloat16 or float32")
    parser.add_argument(
        "--deterministic",
        action="store_const",
        const="true",
        help="equal tokens whatever the batching, chunks, cache hits and workers; slower",
    )
    parser.add_argument(
        "--threads", metavar="N", help="compute threads of each worker (default: the cores, divided evenly)"
    )
    parser.add_argument(
        "--engine", metavar="E", help="torch, or fake: no model, its text proves the KV transfer"
    )
    parser.add_argument("--config", type=Path, metavar="F.toml", help="configuration file, for all processes")
    parser.add_argument(
        "--ready-file", type=Path, metavar="F", help="JSON with addresses and pids, once ready"
    )
    parser.add_argument(
        "--log-dir",
        type=Path,
        metavar="DIR",
        help="a log file a process, instead of prefixed lines on stderr",
    )
    add_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal; the exit code. Raises PdserveError for what can't be started as asked."""
    from deploy.local.plan import Shape
    from deploy.local.up import UpOptions, run_up

    flags = settings_of(arguments)
    config = load(arguments.config, os.environ, flags)
    prefill, decode, both = counts_of(arguments)
    options = UpOptions(
        shape=Shape(num_prefill=prefill, num_decode=decode, num_both=both),
        config=config,
        config_file=None if arguments.config is None else arguments.config.resolve(),
        flags=flags,
        ready_file=None if arguments.ready_file is None else arguments.ready_file.absolute(),
        log_dir=arguments.log_dir,
    )
    _check_model(config)
    try:
        fault = run_up(options)
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}") from error
    if fault is not None:
        sys.stderr.write(f"error: {fault}\n")
        return 1
    return 0


def settings_of(arguments: argparse.Namespace) -> dict[str, object]:
    """ "table.key" → value of all flags given; a short one that contradicts its long form is an error."""
    flags = flags_of(arguments)
    for short, name in _SHORT.items():
        value = getattr(arguments, short)
        if value is None:
            continue
        if flags.get(name, value) != value:
            raise ConfigError(
                f"command line: --{short} {value} and --{name} {flags[name]} contradict each other"
            )
        flags[name] = value
    return flags


def counts_of(arguments: argparse.Namespace) -> tuple[int, int, int]:
    """Prefill, decode and both workers; one prefill and one decode worker if no number was given."""
    given = (arguments.prefill, arguments.decode, arguments.both)
    if all(count is None for count in given):
        return 1, 1, 0
    prefill, decode, both = (count or 0 for count in given)
    return prefill, decode, both


def _check_model(config: Config) -> None:
    """Fail here, in one line, rather than in each child."""
    if config.engine.kind == "fake":
        return
    if not config.worker.model:
        raise ConfigError(
            "no model: give --model an alias (pdserve fetch), a Hugging Face folder or a .gguf file"
        )
    from pdserve.modelstore import resolve

    resolve(config.worker.model)
