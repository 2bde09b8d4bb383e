"""What one API key may still do: calls and tokens a minute, generations at a time."""

from __future__ import annotations

from collections.abc import Callable

from pdserve.clock import Clock
from pdserve.errors import DEFAULT_RETRY_AFTER_S, Overloaded
from pdserve.service.api_keys import ApiKey

_MINUTE_S = 60.0


class _Bucket:
    """Fills with so many a minute, up to as many; may be overdrawn by what turns out later."""

    def __init__(self, per_minute: int, now_s: float) -> None:
        self._per_minute = per_minute
        self._left = float(per_minute)
        self._filled_s = now_s

    def change(self, per_minute: int, now_s: float) -> None:
        """Another rate from now on; what was taken stays taken."""
        if per_minute != self._per_minute:
            taken = self._per_minute - self._fill(now_s)
            self._per_minute, self._left = per_minute, per_minute - taken

    def missing_s(self, least: float, now_s: float) -> float:
        """How long until so many are left; 0 = they are, or there is no limit."""
        if not self._per_minute:
            return 0.0
        return max(0.0, least - self._fill(now_s)) * _MINUTE_S / self._per_minute

    def take(self, count: int) -> None:
        self._left -= count

    def _fill(self, now_s: float) -> float:
        grown = (now_s - self._filled_s) * self._per_minute / _MINUTE_S
        self._left, self._filled_s = min(self._per_minute, self._left + grown), now_s
        return self._left


class KeyLimits:
    """Event-loop thread only. on_refused: told which limit was met."""

    def __init__(self, key: ApiKey, clock: Clock, on_refused: Callable[[str], None]) -> None:
        self._key = key
        self._clock = clock
        self._on_refused = on_refused
        self._requests = _Bucket(key.requests_per_minute, clock.now_s())
        self._tokens = _Bucket(key.tokens_per_minute, clock.now_s())
        self._num_running = 0

    def change(self, key: ApiKey) -> None:
        """The file says something else of this key now."""
        now_s = self._clock.now_s()
        self._requests.change(key.requests_per_minute, now_s)
        self._tokens.change(key.tokens_per_minute, now_s)
        self._key = key

    def take_call(self) -> None:
        """One call more. Raises Overloaded with the time until there is room for it."""
        now_s = self._clock.now_s()
        self._refuse_for("tokens_per_minute", self._tokens.missing_s(1.0, now_s))
        self._refuse_for("requests_per_minute", self._requests.missing_s(1.0, now_s))
        self._requests.take(1)

    def begin(self) -> None:
        """One call more that is a generation, until `end`. Raises Overloaded."""
        if 0 < self._key.max_concurrent <= self._num_running:
            self._refuse_for("max_concurrent", DEFAULT_RETRY_AFTER_S)
        self.take_call()
        self._num_running += 1

    def end(self) -> None:
        """A generation has ended."""
        self._num_running -= 1

    def take_tokens(self, count: int) -> None:
        """They have been computed for this key: later calls pay for what was too much."""
        self._tokens.take(count)

    def _refuse_for(self, limit: str, wait_s: float) -> None:
        if wait_s > 0:
            self._on_refused(limit)
            raise Overloaded("this API key's limit is reached", retry_after_s=round(wait_s, 3), limit=limit)
