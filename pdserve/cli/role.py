"""`pdserve role`: another role for a running worker."""

from __future__ import annotations

import argparse

from pdserve.cli.target import add_worker, ask_operators

DESCRIPTION = """\
Makes a worker drain and rejoin in another role; its weights stay loaded. Returns when the worker has been told:
`pdserve status` shows when it has joined again. Refused for the last worker of a role, unless forced.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Worker, role, router."""
    parser.add_argument("--set", required=True, choices=("prefill", "decode", "both"), help="the new role")
    add_worker(parser)


def run(arguments: argparse.Namespace) -> int:
    """Ask once."""
    from pdserve.messages import Role

    role = Role(arguments.set)
    ask_operators(
        arguments, lambda operator: operator.set_role(arguments.worker, role, force=arguments.force)
    )
    print(f"{arguments.worker} drains, then rejoins as {arguments.set}")
    return 0
