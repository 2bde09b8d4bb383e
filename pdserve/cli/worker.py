"""`pdserve worker`, `prefill` and `decode`: one worker process."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys

from pdserve.cli.settings import WORKER, add_settings, read_settings
from pdserve.messages import Role
from pdserve.openmp import wait_briefly
from pdserve.service.settings import ConfigError

DESCRIPTION = """\
Starts one worker. A prefill worker computes the KV of prompts, samples the first token, and hands both to a decode
worker, which streams the other tokens, many requests in one batch; `pdserve worker` takes its role from `worker.role`.
It dials its routers and serves until SIGTERM or Ctrl-C: a first one drains, a second one ends it at once. Every setting
is also a key of the configuration file and an environment variable (--engine.threads = [engine] threads =
PDSERVE_ENGINE__THREADS).
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """All settings."""
    add_settings(parser, WORKER)


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal, in the role that the command names, or the configured one."""
    config = read_settings(arguments, WORKER)
    if config.engine.kind == "torch" and not config.worker.model:
        raise ConfigError(
            "no model: give --model an alias (see `pdserve fetch`), a Hugging Face folder or a .gguf file"
        )
    wait_briefly(os.environ)  # before torch comes in with the next lines
    from pdserve.cli.progress_bar import ProgressBar
    from pdserve.cli.roles import ROLES
    from pdserve.node.process import run_worker

    # Without a terminal the log says it.
    make_bar = (
        ProgressBar if sys.stderr.isatty() and config.engine.kind == "torch" else contextlib.nullcontext
    )
    role = Role(config.worker.role if arguments.command == "worker" else arguments.command)
    return asyncio.run(run_worker(config, role, ROLES, make_bar=make_bar)) or 0
