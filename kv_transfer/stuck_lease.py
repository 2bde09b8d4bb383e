"""The one log line about a lease that doesn't move."""

from __future__ import annotations

from enum import Enum
from typing import Protocol

import structlog

from pdserve.ids import AttemptName, WorkerRef
from pdserve.stuck import STUCK_S, MayStick, is_newly_stuck

log = structlog.get_logger()


class LiveLease(MayStick, Protocol):
    """A lease of either end."""

    @property
    def lease_id(self) -> int: ...
    @property
    def state(self) -> Enum: ...
    @property
    def name(self) -> AttemptName: ...


def log_if_stuck(lease: LiveLease, *, side: str, peer: WorkerRef, now_s: float) -> float:
    """Warn once per state; returns the next look's moment (never, once logged)."""
    if is_newly_stuck(lease, now_s):
        log.warning(
            "lease.stuck",
            side=side,
            lease_id=lease.lease_id,
            **lease.name.logged,
            state=lease.state.value,
            peer=peer.id,
            age_s=round(now_s - lease.progress_s, 3),
        )
    return float("inf") if lease.is_stuck_logged else lease.progress_s + STUCK_S
