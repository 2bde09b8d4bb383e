"""The operator as a process: it waits until it leads, then kopf watches, and a keeper acts for each service."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import kopf
import structlog
from prometheus_client import CollectorRegistry

from deploy.k8s.operator.api import Api
from deploy.k8s.operator.lease import Leadership
from deploy.k8s.operator.manifests import Manifest
from deploy.k8s.operator.routers import RouterPods, pod_ip
from deploy.k8s.operator.watching import Watching
from pdserve.clock import SystemClock
from pdserve.ids import draw_text_id, system_random
from pdserve.service.config import LogConfig
from pdserve.service.http import HttpServer
from pdserve.service.lifecycle import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK
from pdserve.service.logs import set_up_logs
from pdserve.service.settings import ConfigError

_OWN_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
LEASE = "pdserve-operator"

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorOptions:
    """namespace  that it looks after; "" = all. lease_namespace: where its Lease is; "" = its own"""

    namespace: str
    lease_namespace: str
    metrics: str
    resync_s: float
    log: LogConfig


async def run_operator(options: OperatorOptions, ip_of: Callable[[Manifest], str] = pod_ip) -> int:
    """Until SIGTERM or SIGINT; returns the exit code: 1 if leadership was lost. Raises ConfigError.

    ip_of  where a pod is reached, "" = nowhere yet
    """
    clock, random = SystemClock(), system_random()
    identity = f"{socket.gethostname()}-{draw_text_id(random, 'operator')}"
    set_up_logs(options.log, role="operator", operator=identity)
    connection = connect()
    lease_namespace = options.lease_namespace or _own_namespace(connection)
    registry = CollectorRegistry()
    async with Api(connect) as api, asyncio.TaskGroup() as tasks:
        watching = Watching(
            api,
            connect,
            clock,
            random,
            registry,
            RouterPods(api, ip_of),
            namespace=options.namespace,
            resync_s=options.resync_s,
            has_budgets=await api.has("policy/v1", "PodDisruptionBudget"),
        )
        http = HttpServer(registry, list, list)  # who waits to lead is ready too: a rollout needs it to be
        log.info("operator.listening", metrics=await http.start(options.metrics))
        stop = asyncio.Event()

        async def pause(seconds: float) -> None:
            try:
                async with asyncio.timeout(seconds):
                    await stop.wait()
            except TimeoutError:
                pass

        leadership = Leadership(api, lease_namespace, LEASE, identity, clock, pause)
        _stop_on_signals(stop)
        try:
            if not await leadership.acquire(stop.is_set):
                return EXIT_OK
            keeping = tasks.create_task(_keep(leadership, stop))
            await watching.run(stop, lambda: _stop_on_signals(stop))  # again: kopf has set its own
            stop.set()
            await keeping
            has_led = leadership.held
            await leadership.release()
        finally:
            stop.set()
            http.close()
    return EXIT_OK if has_led else EXIT_FAILED


async def _keep(leadership: Leadership, stop: asyncio.Event) -> None:
    await leadership.keep(stop.is_set)
    stop.set()


def _stop_on_signals(stop: asyncio.Event) -> None:
    """The first ends the watching and gives up the leadership, the second ends the process at once."""

    def on_signal() -> None:
        if stop.is_set():
            os._exit(EXIT_INTERRUPTED)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)


def connect() -> kopf.ConnectionInfo:
    """By the pod's service account, else by KUBECONFIG. Raises ConfigError."""
    settings = kopf.OperatorSettings()
    try:
        for way in _WAYS:
            if (connection := way(settings=settings)) is not None:
                return connection
    except (OSError, ValueError, KeyError, kopf.LoginError) as error:
        raise ConfigError(f"the API server of Kubernetes: {type(error).__name__}: {error}") from error
    raise ConfigError("where is Kubernetes? Run in a pod with a service account, or set KUBECONFIG")


_WAYS: tuple[Callable[..., kopf.ConnectionInfo | None], ...] = (
    kopf.login_with_service_account,
    kopf.login_with_kubeconfig,
)


def _own_namespace(connection: kopf.ConnectionInfo) -> str:
    if _OWN_NAMESPACE.exists():
        return _OWN_NAMESPACE.read_text().strip()
    return os.environ.get("POD_NAMESPACE") or connection.default_namespace or "default"
