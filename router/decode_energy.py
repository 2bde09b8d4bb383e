"""Joules of decoding one choice, over all its attempts, from what each says of itself so far."""

from __future__ import annotations

from router.attempt_contract import AttemptFacts


class DecodeEnergy:
    """Event-loop thread only."""

    def __init__(self) -> None:
        self._attempt: AttemptFacts | None = None
        self._before_j = 0.0  # of attempts before this one
        self.total_j: float | None = None  # None: no worker could tell any

    def note(self, attempt: AttemptFacts, energy_j: float) -> None:
        """energy_j: of this attempt from its start to here."""
        if attempt is not self._attempt:
            self._attempt, self._before_j = attempt, self.total_j or 0.0
        self.total_j = self._before_j + energy_j
