"""`pdserve gateway`: HTTP in front of any number of routers."""

from __future__ import annotations

import argparse
import os
from collections.abc import MutableMapping

from pdserve.cli.settings import GATEWAY, add_settings, read_settings
from pdserve.cli.target import add_routers, targets_of, tls_of
from pdserve.service.http_config import http_extra

DEFAULT_LISTEN = "127.0.0.1:8000"
DESCRIPTION = f"""\
Serves HTTP as OpenAI's clients speak it (docs/openai.md) and asks routers by gRPC, at {DEFAULT_LISTEN} unless
--listen says otherwise. There may be any number of gateways. A stream whose router is lost goes on at another one:
nothing is missing, nothing repeated. API keys are checked by the routers. The first SIGTERM or Ctrl-C drains it, a
second one ends it at once.
"""


# Sockets of channels are then read by the thread that waits for gRPC's events, not by one of gRPC's own that wakes it:
# a tenth less of a gateway's processor time (docs/performance.md).
_GRPC_SETTING, _GRPC_VALUE = "GRPC_EXPERIMENTS", "-event_engine_client"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Its routers; all settings."""
    add_routers(parser)
    add_settings(parser, GATEWAY)


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal."""
    read_sockets_at_once(os.environ)
    config = read_settings(arguments, GATEWAY, defaults={"http.listen": DEFAULT_LISTEN})
    targets, tls = targets_of(arguments), tls_of(arguments)
    with http_extra("`pdserve gateway`"):
        from pdserve.gateway.process import serve  # only now: a wrong flag is answered at once
    return serve(config, targets, tls)


def read_sockets_at_once(environ: MutableMapping[str, str]) -> None:
    """Before gRPC is imported, which reads it then; what the operator has set stays."""
    environ.setdefault(_GRPC_SETTING, _GRPC_VALUE)
