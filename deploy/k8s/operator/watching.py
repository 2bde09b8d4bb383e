"""What kopf watches, and whom it wakes: one keeper for each DisaggregatedService."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import kopf
import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge

from deploy.k8s.operator.api import Api, ApiError
from deploy.k8s.operator.keeper import PassOutcome, ServiceKeeper
from deploy.k8s.operator.manifests import INSTANCE, MANAGED_BY, MANAGER
from deploy.k8s.operator.routers import AskRouters
from deploy.k8s.operator.spec import GROUP, VERSION
from pdserve.clock import Clock
from pdserve.ids import Random

FINALIZER = f"{GROUP}/drain"
_CHANGING_S = 2.0  # how soon to look again while something is under way, should an event be missed
_DRAIN_S = 1.0
_UNREACHABLE = (ApiError, aiohttp.ClientError, TimeoutError)

log = structlog.get_logger()


@dataclass(slots=True)
class _Kept:
    """One service: its keeper, and what wakes it."""

    keeper: ServiceKeeper
    wake: asyncio.Event = field(default_factory=asyncio.Event)


class Watching:
    """One event loop.

    namespace  "" = all
    resync_s   how often each service is looked at, though nobody has said that something changed
    """

    def __init__(
        self,
        api: Api,
        connect: Callable[[], kopf.ConnectionInfo],
        clock: Clock,
        random: Random,
        registry: CollectorRegistry,
        ask: AskRouters,
        *,
        namespace: str,
        resync_s: float,
        has_budgets: bool,
    ) -> None:
        self._api = api
        self._connect = connect
        self._clock = clock
        self._random = random
        self._ask = ask
        self._namespace = namespace
        self._resync_s = resync_s
        self._has_budgets = has_budgets
        self._kept: dict[tuple[str, str], _Kept] = {}
        self._passes = Counter(
            "pdserve_operator_passes",
            "Looks at a DisaggregatedService, by what they came to",
            ("outcome",),
            registry=registry,
        )
        self._conditions = Gauge(
            "pdserve_operator_condition",
            "Whether a condition of a DisaggregatedService holds",
            ("namespace", "service", "type"),
            registry=registry,
        )

    async def run(self, stop: asyncio.Event, on_begin: Callable[[], None] = lambda: None) -> None:
        """Watch until `stop` is set. on_begin: called when kopf has set up what it wants of the loop."""
        others = asyncio.all_tasks()  # kopf waits for all tasks that it isn't told of, and then cancels them
        tasks = await kopf.spawn_tasks(
            registry=self._handlers(),
            settings=_settings(),
            clusterwide=not self._namespace,
            namespaces=[self._namespace] if self._namespace else [],
            standalone=True,  # a Lease says who leads
            stop_flag=stop,
        )
        on_begin()
        await kopf.run_tasks(tasks, ignored=others)

    def _handlers(self) -> kopf.OperatorRegistry:
        registry = kopf.OperatorRegistry()
        services = (GROUP, VERSION, "disaggregatedservices")
        ours = {MANAGED_BY: MANAGER}

        @kopf.on.login(registry=registry)
        def login(**_: Any) -> kopf.ConnectionInfo:
            return self._connect()

        @kopf.daemon(*services, registry=registry, cancellation_backoff=10.0, cancellation_timeout=5.0)
        async def keep(namespace: str | None, name: str, body: kopf.Body, stopped: Any, **_: Any) -> None:
            await self._keep(str(namespace), name, body, stopped)

        @kopf.on.delete(*services, registry=registry)
        async def drain(namespace: str | None, name: str, body: kopf.Body, **_: Any) -> None:
            await self._drain(str(namespace), name, body)

        @kopf.on.event(*services, registry=registry)
        async def on_service(namespace: str | None, name: str, **_: Any) -> None:
            self._wake(str(namespace), name)

        @kopf.on.event(GROUP, VERSION, "workerpools", labels=ours, registry=registry)
        @kopf.on.event("apps", "v1", "deployments", labels=ours, registry=registry)
        @kopf.on.event("", "v1", "services", labels=ours, registry=registry)
        @kopf.on.event("", "v1", "pods", labels=ours, registry=registry)
        async def on_object(namespace: str | None, labels: Mapping[str, str], **_: Any) -> None:
            self._wake(str(namespace), labels.get(INSTANCE, ""))

        return registry

    def _wake(self, namespace: str, name: str) -> None:
        if kept := self._kept.get((namespace, name)):
            kept.wake.set()

    def _of(self, namespace: str, name: str, body: kopf.Body) -> _Kept:
        def announce(kind: str, reason: str, message: str) -> None:
            kopf.event(body, type=kind, reason=reason, message=message)

        if (kept := self._kept.get((namespace, name))) is None:
            keeper = ServiceKeeper(
                self._api,
                namespace,
                name,
                self._clock,
                self._random,
                announce,
                self._ask,
                has_budgets=self._has_budgets,
            )
            kept = self._kept[namespace, name] = _Kept(keeper)
        return kept

    async def _keep(self, namespace: str, name: str, body: kopf.Body, stopped: Any) -> None:
        kept = self._of(namespace, name, body)
        while not stopped:
            kept.wake.clear()
            outcome = await self._pass(namespace, name, kept.keeper)
            if outcome in (PassOutcome.GONE, PassOutcome.DRAINING, PassOutcome.DRAINED):
                return
            quiet = outcome in (PassOutcome.KEPT, PassOutcome.INVALID)
            limit_s = self._resync_s if quiet else min(_CHANGING_S, self._resync_s)
            await _either(kept.wake, stopped, min(limit_s, kept.keeper.look_within_s))

    async def _drain(self, namespace: str, name: str, body: kopf.Body) -> None:
        kept = self._of(namespace, name, body)
        outcome = await self._pass(namespace, name, kept.keeper)
        if outcome not in (PassOutcome.GONE, PassOutcome.DRAINED):
            raise kopf.TemporaryError("pods finish their requests", delay=_DRAIN_S)
        del self._kept[namespace, name]
        for kind in kept.keeper.conditions:
            self._conditions.remove(namespace, name, kind)
        log.info("service.drained", namespace=namespace, service=name)

    async def _pass(self, namespace: str, name: str, keeper: ServiceKeeper) -> PassOutcome | None:
        """None: it failed, which is logged and counted; the next one starts over."""
        try:
            outcome = await keeper.run_pass()
        except* _UNREACHABLE as group:
            error = group.exceptions[0]
            log.warning(
                "pass.failed", namespace=namespace, service=name, error=str(error) or "no answer in time"
            )
            self._passes.labels("failed").inc()
            outcome = None
        if outcome is not None:
            self._passes.labels(outcome.value).inc()
            for kind, holds in keeper.conditions.items():
                self._conditions.labels(namespace, name, kind).set(holds)
        return outcome


async def _either(wake: asyncio.Event, stopped: Any, limit_s: float) -> None:
    waits = [asyncio.ensure_future(wake.wait()), asyncio.ensure_future(stopped.wait())]
    try:
        await asyncio.wait(waits, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for each in waits:
            each.cancel()


def _settings() -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    settings.scanning.disabled = True  # kinds don't come and go; so no right to watch CRDs is needed
    settings.posting.loggers = False
    settings.posting.reporting_component = MANAGER
    settings.posting.event_name_prefix = "pdserve-"
    settings.persistence.finalizer = FINALIZER
    settings.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix=f"operator.{GROUP}")
    settings.persistence.diffbase_storage = kopf.AnnotationsDiffBaseStorage(prefix=f"operator.{GROUP}")
    settings.process.ultimate_exiting_timeout = None
    settings.watching.server_timeout = 300
    settings.watching.reconnect_backoff = 1.0
    settings.background.cancellation_polling = 1
    settings.queueing.idle_timeout = 1.0
    settings.queueing.exit_timeout = 1.0
    return settings
