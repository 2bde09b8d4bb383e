"""Looks, decides and acts, again and again, on a clock that is handed in."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Protocol

import structlog

from deploy.scaling.actuator import Actuator
from deploy.scaling.decide import Decision, History, decide
from deploy.scaling.observe import Counted, Observed, observe
from deploy.scaling.targets import SCALED, ScalingTargets
from pdserve.clock import Clock
from pdserve.errors import PdserveError
from pdserve.status import ClusterStatus

log = structlog.get_logger()


class Routers(Protocol):
    """All routers of the cluster."""

    async def ask(self) -> Sequence[ClusterStatus | None]:
        """What each says now; None for one that doesn't answer in time."""
        ...


class Audience(Protocol):
    """Whom decisions are told: a screen, the routers, a custom resource's status."""

    async def tell(self, decision: Decision) -> None:
        """After every look that came to one; what was changed has been ordered, or `change` says why not."""
        ...


class ScalingLoop:
    """One event loop. `targets` may be replaced while it runs.

    pause  waits for `interval_s`, or less when everything stops
    """

    def __init__(
        self,
        routers: Routers,
        actuator: Actuator,
        audience: Audience,
        targets: ScalingTargets,
        clock: Clock,
        pause: Callable[[float], Awaitable[None]],
    ) -> None:
        self.targets = targets
        self._routers = routers
        self._actuator = actuator
        self._audience = audience
        self._clock = clock
        self._pause = pause
        self._history = History()
        self._counted: Counted = {}
        self._blind = False
        self.seen: Observed | None = None

    async def run(self, until: Callable[[], bool]) -> None:
        """Look until it says that it is time to end."""
        while not until():
            await self.look()
            await self._pause(self.targets.how.interval_s)

    async def look(self) -> Decision | None:
        """Once; None: nobody has answered, so nothing was decided."""
        answers = await self._routers.ask()
        self.seen, self._counted = observe(self._clock.now_s(), answers, self._counted)
        if self.seen is None:
            self._history = self._history.blind()
            if not self._blind:
                log.warning("scaling.blind", num_routers=len(answers))
            self._blind = True
            return None
        self._blind = False
        counts = self._actuator.counts
        decision, self._history = decide(self.seen, counts, self.targets, self._history)
        try:
            await self._act(decision, self.seen)
        except (PdserveError, OSError) as error:  # decided again after the cool-down, if it still holds then
            log.warning("scaling.failed", wanted=str(decision.counts), why=decision.change, error=str(error))
            decision = replace(decision, change=f"could not be done ({error}): {decision.change}")
        await self._audience.tell(decision)
        return decision

    async def _act(self, decision: Decision, seen: Observed) -> None:
        if not decision.changed:
            return
        before = self._actuator.counts
        log.info(
            "scaling.decided",
            prefill=decision.counts.prefill,
            decode=decision.counts.decode,
            before=str(before),
            changed_roles=[f"{each.worker_id} to {each.role.value}" for each in decision.set_roles],
            why=decision.change,
        )
        for change in decision.set_roles:
            await self._actuator.set_role(change.worker_id, change.role)
        if self._actuator.counts != decision.counts:
            await self._actuator.scale(decision.counts, {role: seen.victims(role) for role in SCALED})
