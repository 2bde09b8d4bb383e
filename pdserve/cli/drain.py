"""`pdserve drain`: a running worker that should go."""

from __future__ import annotations

import argparse

from pdserve.cli.target import add_worker, ask_operators

DESCRIPTION = """\
Lets a worker take no new work, serve what it has (at most timeouts.drain_s), and end with exit code 0; what is left
then goes on at another worker. Returns when the worker has been told. Refused for the last worker of a role, unless
forced. A supervisor that restarts what ends will start it again: stop it there.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Worker, router."""
    add_worker(parser)


def run(arguments: argparse.Namespace) -> int:
    """Ask once."""
    ask_operators(arguments, lambda operator: operator.drain_worker(arguments.worker, force=arguments.force))
    print(f"{arguments.worker} drains, then ends")
    return 0
