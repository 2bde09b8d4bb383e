"""Settings on the command line: one flag for each key of the configuration, and short names for the common ones."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path

from pdserve.cli.main import DEBUG_VARIABLE
from pdserve.service.config import Config, add_flag, add_flags, flags_of, load
from pdserve.service.settings import ConfigError

# Short flag → key.
WORKER = {
    "model": "worker.model",
    "routers": "worker.routers",
    "id": "worker.id",
    "listen": "worker.kv_listen",
    "dtype": "engine.dtype",
    "deterministic": "engine.deterministic",
    "tensor-parallel": "engine.tensor_parallel",
    "threads": "engine.threads",
    "engine": "engine.kind",
    "insecure": "cluster.insecure",
}
_PARSERS = {"tool-parser": "http.tool_parser", "reasoning-parser": "http.reasoning_parser"}
ROUTER = {
    **_PARSERS,
    "listen": "router.listen",
    "workers-listen": "router.workers_listen",
    "http-listen": "http.listen",
    "model": "router.model",
    "id": "router.id",
    "insecure": "cluster.insecure",
}
GATEWAY = {"listen": "http.listen", "insecure": "cluster.insecure", **_PARSERS}
UP = {
    name: WORKER[name]
    for name in ("model", "dtype", "deterministic", "tensor-parallel", "threads", "engine", "insecure")
} | {name: ROUTER[name] for name in ("listen", "workers-listen", "http-listen", *_PARSERS)}
UP |= {"ttft-target": "scaling.ttft_target_s", "itl-target": "scaling.itl_target_s"}


def add_settings(parser: argparse.ArgumentParser, shorts: Mapping[str, str]) -> None:
    """Declare the short flags, --config, and one flag for each key."""
    parser.usage = "%(prog)s [OPTION …] [--TABLE.KEY V …]"  # argparse would list all settings
    for short, key in shorts.items():
        add_flag(parser, f"--{short}", key)
    parser.add_argument("--config", type=Path, metavar="F.toml", help="configuration file")
    add_flags(parser)


def given_settings(arguments: argparse.Namespace, shorts: Mapping[str, str]) -> dict[str, object]:
    """ "table.key" → text of what the command line sets, in its short or long form. Raises ConfigError for both."""
    flags = flags_of(arguments)
    for short, key in shorts.items():
        value = getattr(arguments, short.replace("-", "_"))
        if value is not None and flags.setdefault(key, value) != value:
            raise ConfigError(f"command line: --{short} {value} contradicts --{key} {flags[key]}")
    return flags


def read_settings(
    arguments: argparse.Namespace,
    shorts: Mapping[str, str],
    environ: Mapping[str, str] = os.environ,
    defaults: Mapping[str, object] | None = None,
) -> Config:
    """The configuration: defaults, then the file, the environment, the flags. Raises ConfigError in one line."""
    own = {name: value for name, value in environ.items() if name != DEBUG_VARIABLE}
    return load(arguments.config, own, given_settings(arguments, shorts), defaults)
