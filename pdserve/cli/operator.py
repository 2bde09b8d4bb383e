"""`pdserve operator`: the operator for Kubernetes."""

from __future__ import annotations

import argparse
import importlib.util

from pdserve.service.config import LogConfig
from pdserve.service.settings import ConfigError

DESCRIPTION = """\
Runs the operator for Kubernetes: it makes clusters from objects of kind DisaggregatedService, repairs them, scales
them by their targets, upgrades them without losing a request, and drains them when they are deleted
(docs/kubernetes-operator.md). Needs the extra pdserve[k8s]. It reaches the API server by its pod's service account,
else by KUBECONFIG. Of several operators one acts, by a Lease. Stops on SIGTERM or Ctrl-C; clusters go on without it.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags; there is no configuration file."""
    parser.add_argument(
        "--namespace", default="", metavar="N", help="look after this namespace only (default: all)"
    )
    parser.add_argument(
        "--lease-namespace", default="", metavar="N", help="where its Lease is (default: its pod's namespace)"
    )
    parser.add_argument(
        "--metrics-listen",
        default="127.0.0.1:0",
        metavar="HOST:PORT",
        help="address of /metrics, /healthz and /readyz (default: %(default)s)",
    )
    parser.add_argument(
        "--resync",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="look at each service at least this often (default: %(default)s)",
    )
    parser.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    parser.add_argument("--log-format", default="console", choices=("json", "console"))


def run(arguments: argparse.Namespace) -> int:
    """Watch until a signal."""
    if importlib.util.find_spec("kopf") is None:
        raise ConfigError("the operator needs the extra k8s: pip install 'pdserve[k8s]'")
    if not arguments.resync > 0:
        raise ConfigError(f"--resync must be above 0, got {arguments.resync:g}")
    import asyncio

    from deploy.k8s.operator.process import OperatorOptions, run_operator

    return asyncio.run(
        run_operator(
            OperatorOptions(
                namespace=arguments.namespace,
                lease_namespace=arguments.lease_namespace,
                metrics=arguments.metrics_listen,
                resync_s=arguments.resync,
                log=LogConfig(level=arguments.log_level, format=arguments.log_format),
            )
        )
    )
