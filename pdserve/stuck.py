"""What doesn't move though it should: each owner says so once of each state of a lease or an attempt."""

from __future__ import annotations

from typing import Protocol

STUCK_S = 5.0


class MayStick(Protocol):
    """progress_s: when something last moved; is_stuck_logged: reset by every change of state."""

    is_stuck_logged: bool

    @property
    def progress_s(self) -> float: ...


def is_newly_stuck(it: MayStick, now_s: float) -> bool:
    """Whether nothing has moved for STUCK_S and nobody has said so; True once."""
    if it.is_stuck_logged or now_s < it.progress_s + STUCK_S:
        return False
    it.is_stuck_logged = True
    return True
