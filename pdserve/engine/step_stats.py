"""How fast the engine is, from its own steps: estimates for load reports and for the watchdog."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from pdserve.clock import Clock

_WEIGHT = 0.1  # of the newest step in the averages
_NUM_RECENT = 256
OUTLIER = 3.0
OUTLIER_S = 0.05  # … and so much more: short steps vary


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """The engine's part of a load report; see `pdserve.messages.Load`.

    prefill_tokens_per_s   over steps with prefill rows; 0.0 until known
    step_s                 mean time of a step; slowest_step_s: the longest of the last 256
    """

    num_running: int
    num_waiting: int
    num_queued_tokens: int
    num_queued_short_tokens: int
    num_cache_hit_tokens: int
    num_cache_query_tokens: int
    prefill_tokens_per_s: float
    step_s: float
    slowest_step_s: float


class StepStats:
    """Times steps. A step that follows another at once is timed from start to start, so that what the owner does
    between steps counts too; any other from start to end.

    One that takes far longer than those before it (its process was stopped, or got no CPU) counts as OUTLIER times
    what was expected: by a rate that says nothing of the engine, requests would be refused and workers passed over.
    Nor does the first step of all count in averages, which allocates, compiles and reads the weights.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._begun_s = 0.0
        self._last: tuple[float, float, int] | None = None  # begun, ended, prefill tokens; not yet counted
        self._more_followed = False
        self._prefill_tokens = 0.0
        self._prefill_s = 0.0
        self._recent_s: deque[float] = deque(maxlen=_NUM_RECENT)
        self.step_s = 0.0

    @property
    def prefill_tokens_per_s(self) -> float:
        return self._prefill_tokens / self._prefill_s if self._prefill_s > 0 else 0.0

    @property
    def speed_tokens_per_s(self) -> float:
        """The same for the next step's size, known a step earlier: by the second that ran, not counted yet."""
        if self._prefill_s > 0 or not self._recent_s or self._last is None:
            return self.prefill_tokens_per_s
        begun_s, ended_s, num_prefill_tokens = self._last
        return num_prefill_tokens / (ended_s - begun_s) if ended_s > begun_s else 0.0

    @property
    def slowest_step_s(self) -> float:
        """With the latest: what is said before a step is all that is known of its length while it runs."""
        last_s = 0.0 if self._last is None else self._last[1] - self._last[0]
        return max(last_s, max(self._recent_s, default=0.0))

    def begin(self) -> None:
        """A step begins."""
        self._begun_s = self._clock.now_s()
        if self._last is not None:
            begun_s, ended_s, num_prefill_tokens = self._last
            self._count((self._begun_s if self._more_followed else ended_s) - begun_s, num_prefill_tokens)

    def end(self, *, num_prefill_tokens: int, more_follows: bool) -> None:
        """It has ended; more_follows: there is work for another one at once."""
        self._last = (self._begun_s, self._clock.now_s(), num_prefill_tokens)
        self._more_followed = more_follows

    def rest(self) -> None:
        """What was to follow has ended, or can't run: the next step doesn't follow the last one at once."""
        self._more_followed = False

    def _count(self, took_s: float, num_prefill_tokens: int) -> None:
        self._recent_s.append(took_s)
        if len(self._recent_s) == 1:
            return
        if self.step_s > 0:
            took_most_s = min(took_s, _most_s(self.step_s))
            self.step_s = (1 - _WEIGHT) * self.step_s + _WEIGHT * took_most_s
        else:
            self.step_s = took_s
        if num_prefill_tokens:
            rate = self.prefill_tokens_per_s
            if rate > 0:
                took_s = min(took_s, _most_s(num_prefill_tokens / rate))
            self._prefill_tokens = (1 - _WEIGHT) * self._prefill_tokens + num_prefill_tokens
            self._prefill_s = (1 - _WEIGHT) * self._prefill_s + took_s


def _most_s(expected_s: float) -> float:
    return OUTLIER * expected_s + OUTLIER_S
