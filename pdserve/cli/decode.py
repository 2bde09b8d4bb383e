"""`pdserve decode`: one decode worker process."""

from __future__ import annotations

import argparse

from pdserve.cli import worker
from pdserve.messages import Role

DESCRIPTION = """\
Starts one decode worker: it takes the KV in and streams the tokens, many requests in one batch.
It dials its routers and serves until SIGTERM or Ctrl-C: a first one drains, a second one ends it at once. Every setting
is also a key of the configuration file and an environment variable (--engine.threads = PDSERVE_ENGINE__THREADS).
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """All settings."""
    worker.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal."""
    return worker.run_as(arguments, Role.DECODE)
