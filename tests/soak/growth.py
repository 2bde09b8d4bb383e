"""Whether a process has grown, judged by what its memory was each time somebody looked.

One look tells little. A router that is sent messages of megabytes from all sides is seen at 106 MiB and at 231 in one
run, up and down, since what is on its way is in it too, and the heap gives back only what lies on top. What a process
keeps shows in its *least* looks: a leak lifts those as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

PART, BYTES = 0.10, 16 << 20  # growth is more than both


def has_grown(during: Sequence[int], at_end: Sequence[int]) -> bool:
    """Whether memory was kept.

    during: bytes, evenly over a run under load; at_end: bytes, some looks at rest behind it. Either the least of the
    last quarter is above the median of the second one, or the least at the end is above all that was seen before, each
    time by more than 10 % and 16 MiB.
    """
    quarter = max(1, len(during) // 4)
    middle = median(during[quarter : 2 * quarter + 1])
    return min(*during[-quarter:], *at_end) > _most(middle) or min(at_end) > _most(max(during))


def _most(size: float) -> float:
    return max(size * (1 + PART), size + BYTES)
