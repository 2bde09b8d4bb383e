"""One attempt that waits for a pair."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from pdserve.ids import AttemptName
from router.attempt import Outcome
from router.attempt_need import Need
from router.explain import Verdict
from router.placement import Placement


@dataclass(slots=True, eq=False, kw_only=True)
class Ticket:
    """Made by a choice, held by admission.

    queued_s     when its request was received; submitted_s: when this attempt began to wait
    left_s       seconds until its deadline
    start        makes and starts the attempt, in the very call in which the pair is chosen
    outcome      resolved by the attempt, or with what ends the wait for good
    why_waiting  what became of each candidate when it was last looked at
    unfit_since_s  since when all workers' windows are too small for it; None = they aren't
    """

    name: AttemptName
    need: Need
    queued_s: float
    submitted_s: float
    priority: int
    user: str
    replay: bool
    left_s: Callable[[], float]
    start: Callable[[Placement], None]
    outcome: asyncio.Future[Outcome]
    why_waiting: tuple[Verdict, ...] = ()
    is_stuck_logged: bool = False
    unfit_since_s: float | None = None

    @property
    def progress_s(self) -> float:
        return self.submitted_s
