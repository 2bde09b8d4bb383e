"""What a router has counted since it began: a reader subtracts two of these to know what happened between them."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Annotated

from pdserve.errors import InvalidRequest


def _check_not_negative(name: str, value: float) -> None:
    if not 0 <= value < math.inf:
        raise InvalidRequest(f"{name} must be finite and not negative", value=value)


NotNegative = Annotated[float, _check_not_negative]


@dataclass(frozen=True, slots=True)
class Spread:
    """A histogram of seconds.

    bounds_s  rising
    counts    one more than bounds: counts[i] values are above bounds_s[i - 1] and at most bounds_s[i]
    """

    bounds_s: tuple[float, ...] = ()
    counts: tuple[int, ...] = (0,)

    def check(self) -> None:
        """Raises InvalidRequest for bounds that don't rise, or another number of counts."""
        if not all(low < high for low, high in itertools.pairwise((0.0, *self.bounds_s, math.inf))):
            raise InvalidRequest("bounds_s must rise")
        if len(self.counts) != len(self.bounds_s) + 1:
            raise InvalidRequest("there must be one more count than bounds", value=len(self.counts))

    def since(self, earlier: Spread) -> Spread:
        """What has come since; all of it if the router has begun again meanwhile."""
        if earlier.bounds_s != self.bounds_s:
            return self
        counts = tuple(now - then for now, then in zip(self.counts, earlier.counts, strict=True))
        return self if min(counts) < 0 else Spread(self.bounds_s, counts)

    def percentile(self, percent: float) -> float | None:
        """Seconds that so many of a hundred values don't exceed, evenly spread within a bucket.

        None: no values; inf: above the last bound.
        """
        total = sum(self.counts)
        if not total:
            return None
        rank = total * percent / 100
        below = 0
        for low, high, count in zip(
            (0.0, *self.bounds_s), (*self.bounds_s, math.inf), self.counts, strict=True
        ):
            if count and below + count >= rank:
                return high if math.isinf(high) else low + (high - low) * max(0.0, rank - below) / count
            below += count
        return math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterFigures:
    """Counts since the router began.

    at_s                  when it read them, on its own monotonic clock
    num_requests_refused  of those that ended: by RESOURCE_EXHAUSTED
    num_requests_failed   of those that ended: by another error that isn't the client's
    kv_transfer_s         in which the KV bytes of hand-offs arrived
    """

    at_s: NotNegative = 0.0
    num_requests_ended: int = 0
    num_requests_refused: int = 0
    num_requests_failed: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_completion_tokens: int = 0
    num_kv_bytes: int = 0
    kv_transfer_s: NotNegative = 0.0
    ttft: Spread = Spread()
    gap: Spread = Spread()
    queued: Spread = Spread()


NOTHING_COUNTED = RouterFigures()
