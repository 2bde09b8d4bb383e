"""Which routers a command talks to."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from pdserve.service.address import split_address

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


def open_client(arguments: argparse.Namespace) -> Client:
    """A client for --target; nothing is dialled yet. Raises InvalidRequest for what is no address."""
    targets = [part.strip() for part in arguments.target.split(",")]
    for target in targets:
        split_address(target)
    from pdserve.client import Client

    return Client(targets)
