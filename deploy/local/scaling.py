"""Scaling within `pdserve up`: looks at its router and lets the supervisor start and drain workers."""

from __future__ import annotations

from dataclasses import dataclass

from deploy.local.plan import Layout
from deploy.local.screen import Screen
from deploy.local.supervisor import Supervisor
from deploy.local.workers import LocalWorkers
from deploy.scaling.decide import Decision
from deploy.scaling.loop import ScalingLoop
from deploy.scaling.routers import OperatorRouters
from deploy.scaling.targets import ScalingTargets
from pdserve.clock import Clock
from pdserve.operator_client import OperatorClient
from pdserve.service.config import Config
from pdserve.service.secret import read_secret
from pdserve.service.tls import worker_tls


@dataclass(frozen=True, slots=True)
class _ScreenAndRouters:
    """Says changes on the screen, in one line, and all of it to the router."""

    screen: Screen
    routers: OperatorRouters

    async def tell(self, decision: Decision) -> None:
        if decision.changed:
            self.screen.tell(f"scaling: {decision.change}")
        await self.routers.tell(decision)


async def scale_workers(
    supervisor: Supervisor,
    layout: Layout,
    targets: ScalingTargets,
    config: Config,
    screen: Screen,
    clock: Clock,
) -> None:
    """From the moment in which the cluster is ready until everything stops. Raises ConfigError for the secret's file
    or for certificates that can't be used.
    """
    plan = layout.plan
    await supervisor.announced.wait()
    secret, tls = read_secret(plan.secret_file), worker_tls(config.tls)
    async with OperatorRouters(
        [plan.operators], lambda target: OperatorClient(target, secret=secret, tls=tls)
    ) as routers:
        loop = ScalingLoop(
            routers,
            LocalWorkers(supervisor, plan.workers, layout.worker, routers.set_role),
            _ScreenAndRouters(screen, routers),
            targets,
            clock,
            supervisor.pause,
        )
        await loop.run(supervisor.stopping.is_set)
