"""Why each candidate of a placement fell or won, kept for the last requests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from pdserve.ids import AttemptName
from pdserve.request import Timings
from router.scoring import Cost
from router.timings import AttemptTimes, ChoiceTimes

NUM_KEPT = 64


class Verdict(NamedTuple):  # not a dataclass: one is made for each pair at each placement
    """What became of one candidate: its cost, or why it could not be taken.

    prefill  "" = the decode worker prefills itself
    reason   "chosen", or why not
    """

    prefill: str
    decode: str
    cost: Cost | None
    reason: str

    @property
    def chosen(self) -> bool:
        return self.reason == CHOSEN

    def __str__(self) -> str:
        pair = f"{self.prefill}>{self.decode}" if self.prefill else self.decode
        if self.cost is None:
            return f"{pair} {self.reason}"
        parts = " + ".join(f"{name} {value * 1e3:.2f}" for name, value in self.cost.parts if value)
        return f"{pair} {self.cost.score_s * 1e3:.2f} ms = {parts or '0'}: {self.reason}"


CHOSEN = "chosen"


@dataclass(frozen=True, slots=True)
class Explained:
    """One placement. user: whose; placed_s: the router's clock; times: of the choice, and of this attempt at it."""

    user: str
    name: AttemptName
    placed_s: float
    verdicts: tuple[Verdict, ...]
    times: tuple[ChoiceTimes, AttemptTimes]

    @property
    def timings(self) -> Timings | None:
        """Of the choice's first token, if this attempt gave it."""
        of_choice, of_attempt = self.times
        return of_choice.of_first_token(of_attempt)

    def lines(self) -> list[str]:
        """For logs."""
        return [str(verdict) for verdict in self.verdicts]
