"""How long things take, learnt from what workers report: straight lines over tokens, fitted on line.

Every estimate begins at what is known beforehand (a worker's own rate, a guess) and follows the observations as they
come. Old ones fade with time, not only with new ones: a worker that looked slow once is not asked, so nothing new
would ever say that it is fast again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

HALF_LIFE_S = 15.0  # an observation's weight after so long
KEPT = 0.95  # and after one more observation
PRIOR = 0.1  # the weight of each of the two points of the prior, beside 1 for an observation
SCALE = 512.0  # tokens: where the prior's second point lies
OUTLIER = 3.0  # an observation counts as at most so many times what was expected …
OUTLIER_S = 0.05  # … and so much more: first steps compile, processes are stopped and continued


@dataclass(frozen=True, slots=True)
class Prior:
    """What a line is before anything was observed: seconds at 0, seconds a token."""

    base_s: float = 0.0
    slope_s: float = 0.0


class Line:
    """y ≈ a + b·x, a and b at least 0; least squares with the prior as two points. Event-loop thread only."""

    def __init__(self) -> None:
        self._at_s = 0.0
        self._n = self._x = self._y = self._xx = self._xy = self._yy = 0.0

    def observe(self, x: float, y_s: float, prior: Prior, now_s: float) -> None:
        """One observation: y_s seconds for x tokens."""
        most_s = OUTLIER * self.predict(x, prior, now_s) + OUTLIER_S
        y_s = min(max(y_s, 0.0), most_s)
        kept = KEPT * self._faded(now_s)
        self._at_s = now_s
        self._n = kept * self._n + 1.0
        self._x = kept * self._x + x
        self._y = kept * self._y + y_s
        self._xx = kept * self._xx + x * x
        self._xy = kept * self._xy + x * y_s
        self._yy = kept * self._yy + y_s * y_s

    def predict(self, x: float, prior: Prior, now_s: float) -> float:
        """Seconds for x tokens."""
        if not self._n:
            return prior.base_s + x * prior.slope_s
        a, b = self._solve(prior, self._faded(now_s))
        return a + b * x

    def fitted(self, prior: Prior, now_s: float) -> Prior:
        """The line itself, for others to begin at."""
        return Prior(*self._solve(prior, self._faded(now_s)))

    def doubt_s(self, prior: Prior, now_s: float) -> float:
        """How far off a prediction may well be, by how much the observations vary; 0 where there are none."""
        weight = self._faded(now_s)
        if weight * self._n < 1e-3:
            return 0.0
        a, b = self._solve(prior, weight)
        n, x, y = self._n, self._x, self._y
        off = self._yy - 2 * (a * y + b * self._xy) + a * a * n + 2 * a * b * x + b * b * self._xx
        return math.sqrt(max(0.0, off / n) / max(1.0, weight * n))

    def known(self, now_s: float) -> bool:
        """Whether there is an observation, and not too long ago."""
        return self._n * self._faded(now_s) > 0.5

    def _faded(self, now_s: float) -> float:
        return 0.5 ** (max(0.0, now_s - self._at_s) / HALF_LIFE_S) if self._n else 0.0

    def _solve(self, prior: Prior, weight: float) -> tuple[float, float]:
        far_s = prior.base_s + prior.slope_s * SCALE
        n = weight * self._n + 2 * PRIOR
        x = weight * self._x + PRIOR * SCALE
        y = weight * self._y + PRIOR * (prior.base_s + far_s)
        xx = weight * self._xx + PRIOR * SCALE * SCALE
        xy = weight * self._xy + PRIOR * SCALE * far_s
        b = (n * xy - x * y) / (n * xx - x * x)  # the two points of the prior keep this above 0
        if b < 0:
            return y / n, 0.0
        a = (y - b * x) / n
        return (a, b) if a >= 0 else (0.0, xy / xx)


@dataclass(slots=True)
class WorkerFits:
    """Lines of one worker.

    queue         prompt tokens queued there when a prompt was sent → until its first chunk
    prefill       tokens to be computed → first chunk to first token, nothing else running
    prefill_busy  the same beside running streams (a worker that prefills for itself)
    trip          router to worker and back, at x = 0
    """

    queue: Line = field(default_factory=Line)
    prefill: Line = field(default_factory=Line)
    prefill_busy: Line = field(default_factory=Line)
    trip: Line = field(default_factory=Line)
