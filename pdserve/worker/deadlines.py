"""When which attempt has to be over: the clients' deadlines as the worker counts them."""

from __future__ import annotations

import heapq


class Deadlines:
    """Moments of the worker's clock by handle. Engine owner only; an ended attempt's entry is dropped when due."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int]] = []

    def add(self, handle: int, at_s: float) -> None:
        heapq.heappush(self._heap, (at_s, handle))

    def due(self, now_s: float) -> list[int]:
        """Handles whose moment has passed, earliest first; each is named once."""
        handles: list[int] = []
        while self._heap and self._heap[0][0] <= now_s:
            handles.append(heapq.heappop(self._heap)[1])
        return handles

    @property
    def next_s(self) -> float | None:
        return self._heap[0][0] if self._heap else None
