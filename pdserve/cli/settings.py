"""Settings on the command line: one flag for each key of the configuration, and short names for the common ones."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pdserve.cli.main import DEBUG_VARIABLE
from pdserve.service.config import Config, add_flags, flags_of, load
from pdserve.service.settings import ConfigError


@dataclass(frozen=True, slots=True)
class Short:
    """A short flag for a key; without a metavar it is a switch."""

    flag: str
    key: str
    help: str
    metavar: str | None = None


MODEL = Short("model", "worker.model", "fetched alias, Hugging Face folder, or .gguf file", "M")
ROUTERS = Short("routers", "worker.routers", "routers to dial, HOST:PORT[,HOST:PORT…]", "LIST")
WORKER = (
    MODEL,
    ROUTERS,
    Short("id", "worker.id", "name of this worker (default: drawn at start)", "NAME"),
    Short(
        "listen",
        "worker.kv_listen",
        "TCP address where prefill workers reach this one's KV link",
        "HOST:PORT",
    ),
    Short("dtype", "engine.dtype", "auto, bfloat16 or float32", "T"),
    Short(
        "deterministic",
        "engine.deterministic",
        "equal tokens whatever the batching, chunks, cache hits and workers; slower",
    ),
    Short("threads", "engine.threads", "compute threads (default: as many as cores)", "N"),
    Short("engine", "engine.kind", "torch, or fake: no model, its text proves the KV transfer", "E"),
)
ROUTER = (
    Short("listen", "router.listen", "address of the gRPC server; port 0 = a free one", "HOST:PORT"),
    Short(
        "model",
        "router.model",
        "alias, folder or .gguf file whose tokenizer to use; without it, a worker's",
        "M",
    ),
    Short("id", "router.id", "name of this router (default: drawn at start)", "NAME"),
)


def add_settings(parser: argparse.ArgumentParser, shorts: tuple[Short, ...]) -> None:
    """Declare the short flags, --config, and one flag for each key."""
    parser.usage = "%(prog)s [OPTION …] [--TABLE.KEY V …]"  # argparse would list all settings
    for short in shorts:
        if short.metavar is None:
            parser.add_argument(f"--{short.flag}", action="store_const", const="true", help=short.help)
        else:
            parser.add_argument(f"--{short.flag}", metavar=short.metavar, help=short.help)
    parser.add_argument("--config", type=Path, metavar="F.toml", help="configuration file")
    add_flags(parser)


def read_settings(
    arguments: argparse.Namespace, shorts: tuple[Short, ...], environ: Mapping[str, str] = os.environ
) -> Config:
    """The configuration: defaults, then the file, the environment, the flags. Raises ConfigError in one line."""
    flags = flags_of(arguments)
    for short in shorts:
        value = getattr(arguments, short.flag)
        if value is None:
            continue
        if flags.get(short.key, value) != value:
            raise ConfigError(
                f"command line: --{short.flag} {value} contradicts --{short.key} {flags[short.key]}"
            )
        flags[short.key] = value
    own = {name: value for name, value in environ.items() if name != DEBUG_VARIABLE}
    return load(arguments.config, own, flags)
