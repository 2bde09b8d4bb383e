"""The drain of a worker as its engine owner counts it."""

from __future__ import annotations

from pdserve.owner import Post
from pdserve.worker.messages import Drained


class Drain:
    """Not begun → no new work → (at the limit: the rest is to be ended) → drained, said once. Engine owner only."""

    def __init__(self, to_loop: Post) -> None:
        self._to_loop = to_loop
        self._until_s: float | None = None
        self._limit_passed = False
        self._drained = False

    @property
    def has_begun(self) -> bool:
        return self._until_s is not None

    @property
    def next_s(self) -> float | None:
        """The moment at which the rest is to be ended, until that has been asked for."""
        return None if self._limit_passed else self._until_s

    def begin(self, until_s: float) -> None:
        """A second order doesn't prolong it."""
        if self._until_s is None or until_s < self._until_s:
            self._until_s = until_s

    def limit_passes(self, now_s: float) -> bool:
        """Whether the rest must be ended now; True once."""
        if self._until_s is None or self._limit_passed or now_s < self._until_s:
            return False
        self._limit_passed = True
        return True

    def note_rest(self, num_left: int) -> None:
        """So much is still in hand; with nothing left the loop is told, once."""
        if self.has_begun and num_left == 0 and not self._drained:
            self._drained = True
            self._to_loop(Drained())
