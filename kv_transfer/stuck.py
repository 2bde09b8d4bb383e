"""The one log line about a lease that doesn't move."""

from __future__ import annotations

from enum import Enum
from typing import Protocol

import structlog

from pdserve.ids import WorkerRef

STUCK_S = 5.0

log = structlog.get_logger()


class Stuckable(Protocol):
    """A lease of either end."""

    progress_s: float
    is_stuck_logged: bool

    @property
    def lease_id(self) -> int: ...
    @property
    def state(self) -> Enum: ...


def log_if_stuck(lease: Stuckable, *, side: str, peer: WorkerRef, now_s: float) -> float:
    """Warn once per state, after STUCK_S without anything new; returns the next look's moment (never, once logged)."""
    due_s = lease.progress_s + STUCK_S
    if lease.is_stuck_logged:
        return float("inf")
    if now_s < due_s:
        return due_s
    lease.is_stuck_logged = True
    log.warning(
        "lease.stuck",
        side=side,
        lease_id=lease.lease_id,
        state=lease.state.value,
        peer=peer.id,
        age_s=round(now_s - lease.progress_s, 3),
    )
    return float("inf")
