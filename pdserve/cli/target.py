"""Which routers a command talks to."""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from pdserve.service.address import is_loopback, split_address
from pdserve.service.local_secret import local_secret_file
from pdserve.service.secret import read_secret
from pdserve.service.settings import ConfigError

if TYPE_CHECKING:  # grpc takes a quarter of a second: only commands that really run pay for it
    from pdserve.client import AsyncClient, Client
    from pdserve.operator_client import OperatorClient
    from pdserve.service.tls import ClientTls

T = TypeVar("T")

DEFAULT_TARGET = "127.0.0.1:50051"
DEFAULT_OPERATORS_TARGET = "127.0.0.1:50052"
API_KEY_VARIABLE = "PDSERVE_API_KEY"


def add_target(parser: argparse.ArgumentParser) -> None:
    """Where clients reach the router."""
    _add_target(parser, DEFAULT_TARGET, "a router")
    _add_trust(parser, "the router's, if it asks for one")


def add_routers(parser: argparse.ArgumentParser) -> None:
    """Where the routers are that a gateway stands before; its callers bring keys of their own."""
    _add_target(parser, DEFAULT_TARGET, "a router")
    _add_tls(parser)


def _add_trust(parser: argparse.ArgumentParser, what: str) -> None:
    _add_tls(parser)
    parser.add_argument(
        "--api-key",
        default="",
        metavar="K",
        help=f"{what}; better in {API_KEY_VARIABLE}, where other users don't see it",
    )


def _add_tls(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tls",
        action="store_true",
        help="the router serves TLS, with a certificate from one of the system's authorities",
    )
    for name, metavar, meaning in (
        ("ca", "F.pem", "the router serves TLS, with a certificate from one of these authorities"),
        ("cert", "F.pem", "this client's certificate, if the router asks for one"),
        ("key", "F.pem", "its key"),
        ("server-name", "NAME", "the name in the router's certificate, if it isn't the host of --target"),
    ):
        parser.add_argument(f"--tls-{name}", default="", metavar=metavar, help=meaning)


def _add_target(parser: argparse.ArgumentParser, default: str, what: str) -> None:
    parser.add_argument(
        "--target",
        default=default,
        metavar="HOST:PORT[,…]",
        help=f"{what}, or several: if one is lost, the next one is used (default {default})",
    )


def add_worker(parser: argparse.ArgumentParser) -> None:
    """Which worker an operator means, and what lets them ask."""
    parser.add_argument(
        "--worker", required=True, metavar="W", help="the worker's id, as `pdserve status` shows it"
    )
    parser.add_argument("--force", action="store_true", help="even if it is the last worker of its role")
    add_operators(parser)


def add_operators(parser: argparse.ArgumentParser) -> None:
    """Where operators reach the router, and what lets them ask."""
    parser.add_argument(
        "--secret-file",
        default="",
        metavar="F",
        help="the cluster's secret (cluster.secret_file); not needed for `pdserve up` on this machine",
    )
    _add_trust(parser, "an admin's, instead of the secret")
    _add_target(parser, DEFAULT_OPERATORS_TARGET, "a router's address for operators (router.workers_listen)")


def open_client(arguments: argparse.Namespace) -> Client:
    """A client for --target; nothing is dialled yet.

    Raises InvalidRequest for what is no address.
    """
    targets = targets_of(arguments)
    from pdserve.client import Client

    return Client(targets, api_key=_api_key(arguments), tls=tls_of(arguments))


def open_async_client(arguments: argparse.Namespace) -> AsyncClient:
    """The same, for an event loop."""
    targets = targets_of(arguments)
    from pdserve.client import AsyncClient

    return AsyncClient(targets, api_key=_api_key(arguments), tls=tls_of(arguments))


def ask_operators(
    arguments: argparse.Namespace, ask: Callable[[OperatorClient], Coroutine[Any, Any, T]]
) -> T:
    """Ask, with the cluster's secret if it has one; what `ask` returns.

    Raises InvalidRequest for what is no address, ConfigError for a --secret-file that can't be used, and what the
    answer says.
    """
    targets = targets_of(arguments)
    secret = read_secret(arguments.secret_file or _local_secret_of(targets))
    api_key = "" if secret is not None and not arguments.api_key else _api_key(arguments)
    from pdserve.operator_client import OperatorClient

    async def run() -> T:
        async with OperatorClient(targets, secret=secret, api_key=api_key, tls=tls_of(arguments)) as operator:
            return await ask(operator)

    return asyncio.run(run())


def _local_secret_of(targets: Sequence[str]) -> str:
    """The file of a `pdserve up` of this user at one of these addresses."""
    for target in targets:
        _, port = split_address(target)
        file = local_secret_file(port)
        if is_loopback(target) and file.is_file():
            return str(file)
    return ""


def _api_key(arguments: argparse.Namespace) -> str:
    return str(arguments.api_key or os.environ.get(API_KEY_VARIABLE, "")).strip()


def tls_of(arguments: argparse.Namespace) -> ClientTls | None:
    """How routers are spoken to; None = without TLS. Raises ConfigError for flags without TLS, and unreadable files."""
    from pdserve.service.tls import ClientTls

    made = ClientTls(
        ca=arguments.tls_ca,
        cert=arguments.tls_cert,
        key=arguments.tls_key,
        server_name=arguments.tls_server_name,
    )
    if not arguments.tls and not arguments.tls_ca:
        if made != ClientTls():
            raise ConfigError("--tls-cert, --tls-key and --tls-server-name need --tls or --tls-ca")
        return None
    made.credentials()
    return made


def targets_of(arguments: argparse.Namespace) -> list[str]:
    """The addresses of --target. Raises InvalidRequest for what is none."""
    targets = [part.strip() for part in arguments.target.split(",")]
    for target in targets:
        split_address(target)
    return targets
