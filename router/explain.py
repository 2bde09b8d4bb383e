"""Why each candidate of a placement fell or won, kept for the last requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from pdserve.clock import Clock
from router.scoring import Cost

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """One placement. attempt: as users count them, from 1; placed_s: the router's clock."""

    request_id: str
    choice: int
    attempt: int
    placed_s: float
    verdicts: tuple[Verdict, ...]

    def lines(self) -> list[str]:
        """For logs."""
        return [str(verdict) for verdict in self.verdicts]


class Explanations:
    """The last placements, oldest first. Event-loop thread only."""

    def __init__(self, clock: Clock, num_kept: int = NUM_KEPT) -> None:
        self._clock = clock
        self._kept: deque[Explained] = deque(maxlen=num_kept)

    def add(self, request_id: str, choice: int, attempt: int, verdicts: tuple[Verdict, ...]) -> Explained:
        """A pair was chosen now."""
        explained = Explained(
            request_id=request_id,
            choice=choice,
            attempt=attempt,
            placed_s=self._clock.now_s(),
            verdicts=verdicts,
        )
        self._kept.append(explained)
        return explained

    def __iter__(self) -> Iterator[Explained]:
        return iter(tuple(self._kept))
