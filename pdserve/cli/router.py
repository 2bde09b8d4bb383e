"""`pdserve router`: one router process."""

from __future__ import annotations

import argparse

from pdserve.cli.settings import ROUTER, add_settings, read_settings

DESCRIPTION = """\
Starts one router: clients send it requests (gRPC), workers dial it. Stops on SIGTERM or Ctrl-C: a first one drains,
a second one ends it at once. Every setting is also a key of the configuration file and an environment variable
(--router.listen = [router] listen = PDSERVE_ROUTER__LISTEN).
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """All settings."""
    add_settings(parser, ROUTER)


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal."""
    config = read_settings(arguments, ROUTER)
    from router.process import serve  # only now: a wrong flag is answered at once

    return serve(config)
