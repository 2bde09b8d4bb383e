"""Joules by phase, of one sequence or of a whole engine; None as long as the machine hasn't told any."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class PhaseEnergy:
    """prefill: up to a sequence's first token; decode: everything after it, recomputing included."""

    prefill_j: float | None = None
    decode_j: float | None = None

    def add_prefill(self, joules: float) -> None:
        self.prefill_j = (self.prefill_j or 0.0) + joules

    def add_decode(self, joules: float) -> None:
        self.decode_j = (self.decode_j or 0.0) + joules
