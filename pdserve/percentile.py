"""Percentiles of values at hand, as logs, messages and reports give them."""

from __future__ import annotations

import math
from collections.abc import Sequence


def percentile(values: Sequence[float], percent: float) -> float:
    """Nearest rank of ascending values; 0.0 of none."""
    if not values:
        return 0.0
    return values[max(0, math.ceil(percent / 100 * len(values)) - 1)]
