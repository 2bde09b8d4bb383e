"""Which routers a command talks to."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from pdserve.service.address import split_address
from pdserve.service.secret import read_secret

if TYPE_CHECKING:  # grpc takes a quarter of a second: only commands that really run pay for it
    from pdserve.client import Client

DEFAULT_TARGET = "127.0.0.1:50051"


def add_target(parser: argparse.ArgumentParser) -> None:
    """Where the router is."""
    parser.add_argument(
        "--target",
        default=DEFAULT_TARGET,
        metavar="HOST:PORT[,…]",
        help=f"a router, or several to go on with if one is lost (default {DEFAULT_TARGET})",
    )


def add_worker(parser: argparse.ArgumentParser) -> None:
    """Which worker an operator means, and what lets them ask."""
    parser.add_argument(
        "--worker", required=True, metavar="W", help="the worker's id, as `pdserve status` shows it"
    )
    parser.add_argument(
        "--force", action="store_true", help="also if no other worker that takes work has its role"
    )
    parser.add_argument(
        "--secret-file",
        default="",
        metavar="F",
        help="the cluster's secret (cluster.secret_file), if it has one",
    )
    add_target(parser)


def open_client(arguments: argparse.Namespace) -> Client:
    """A client for --target; nothing is dialled yet.

    Raises InvalidRequest for what is no address, ConfigError for a --secret-file that can't be used.
    """
    targets = [part.strip() for part in arguments.target.split(",")]
    for target in targets:
        split_address(target)
    from pdserve.client import Client

    return Client(targets, secret=read_secret(getattr(arguments, "secret_file", "")))
