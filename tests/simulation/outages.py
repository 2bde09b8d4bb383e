"""When routers could not serve."""

from __future__ import annotations

from collections.abc import Callable

SLACK_S = 0.1  # clocks of another pace


class Outages:
    """Told whenever a router begins or ceases to be able to serve. None of them can at first."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._since_s: dict[str, float] = {}
        self._serves: dict[str, bool] = {}
        self._past: dict[str, list[tuple[float, float]]] = {}

    def on_serving(self, router_id: str, serving: bool) -> None:
        """A router can serve now, or can't."""
        if self._serves.get(router_id, False) is serving:
            return
        self._serves[router_id] = serving
        now_s = self._now_s()
        if serving:
            self._past.setdefault(router_id, []).append((self._since_s.get(router_id, 0.0), now_s))
        else:
            self._since_s[router_id] = now_s

    def lasted(self, router_id: str, for_s: float, begin_s: float, end_s: float) -> bool:
        """Whether between begin_s and end_s the router could not serve for so long at a stretch."""
        spans = list(self._past.get(router_id, []))
        if not self._serves.get(router_id, False):
            spans.append((self._since_s.get(router_id, 0.0), float("inf")))
        return any(min(end, end_s) - max(begin, begin_s) >= for_s - SLACK_S for begin, end in spans)
