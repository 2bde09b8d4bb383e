"""How far a worker's weights are loaded: for /readyz, for the log, and for a bar in a terminal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import structlog

from pdserve.clock import Clock
from pdserve.modelstore.progress import Progress

log = structlog.get_logger()

_LINE_EVERY_S = 5.0
_MB = 1_000_000


@dataclass(frozen=True, slots=True)
class LoadState:
    """One moment of a load; a text for people."""

    loaded_bytes: int
    total_bytes: int
    elapsed_s: float

    def __str__(self) -> str:
        loaded, total = (f"{size / _MB:,.0f}" for size in (self.loaded_bytes, self.total_bytes))
        return f"{loaded} of {total} MB of weights, {self.elapsed_s:.0f} s"


class LoadProgress:
    """Implements `Progress` for the thread that loads; `post` takes the states to whoever reads them.

    bar  in a terminal; then there are no log lines, which would break it
    """

    def __init__(self, clock: Clock, post: Callable[[LoadState], None], bar: Progress | None) -> None:
        self._clock = clock
        self._post = post
        self._bar = bar
        self._started_s = self._told_s = clock.now_s()
        self._total_bytes = 0

    def begin(self, phase: str, total_bytes: int | None) -> None:
        """The weights are open, their size is known."""
        self._total_bytes = total_bytes or 0
        if self._bar is not None:
            self._bar.begin(phase, total_bytes)
        else:
            log.info("model.loading", total_bytes=self._total_bytes)
        self.reached(0)

    def reached(self, num_bytes: int) -> None:
        """A line every few seconds: a small model has none."""
        self._post(LoadState(num_bytes, self._total_bytes, self.elapsed_s))
        if self._bar is not None:
            self._bar.reached(num_bytes)
        elif self._clock.now_s() - self._told_s >= _LINE_EVERY_S:
            self._told_s = self._clock.now_s()
            log.info("model.loading", loaded_bytes=num_bytes, **self.facts())

    @property
    def elapsed_s(self) -> float:
        return self._clock.now_s() - self._started_s

    def facts(self) -> dict[str, object]:
        """For the line that says that it is done."""
        return {"total_bytes": self._total_bytes, "took_s": round(self.elapsed_s, 3)}
