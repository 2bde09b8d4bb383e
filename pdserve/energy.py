"""What is asked of a meter of electrical energy; the readers are in pdserve.service.energy."""

from __future__ import annotations

from typing import Protocol


class EnergyMeter(Protocol):
    """One thread's, the one that computes."""

    def read_j(self) -> float | None:
        """Joules that this process has used since some fixed moment; None: the machine can't tell, or no longer can."""
        ...
