"""When an answer about a lease is overdue: a link that moves is busy, not dead.

Leases of one link have their pieces in turn. With a hundred on a slow one, each waits far longer than `lease_s` for
its next piece, and nothing is wrong. So an answer is waited for while payload moves on the link, whoever's it is; but
not when more pieces have gone by than may stand before it: then its own frame is lost.
"""

from __future__ import annotations

from typing import Protocol

from msgspec import UnsetType

_SPARE_PIECES = 16


class WaitingLease(Protocol):
    """A lease of either end. watched_s, pass_limit: kept here."""

    @property
    def progress_s(self) -> float: ...

    watched_s: float
    pass_limit: int


class Patience:
    """Of one end of a link. Transfer owner only.

    moves  how often payload was seen to move at this end; the other end is told with PING
    """

    def __init__(self, lease_s: float) -> None:
        self.moves = 0
        self._lease_s = lease_s
        self._moved_s = float("-inf")
        self._heard_moves = 0
        self._num_passed = 0

    def move(self, now_s: float) -> None:
        """Payload has moved, at least a part of a piece."""
        self.moves += 1
        self._moved_s = now_s

    def pass_piece(self, now_s: float) -> None:
        """A whole piece has moved."""
        self._num_passed += 1
        self.move(now_s)

    def hear(self, moves: int | UnsetType, now_s: float) -> None:
        """Of the other end: what has left here may be long under way."""
        if not isinstance(moves, UnsetType) and moves > self._heard_moves:
            self._heard_moves = moves
            self._moved_s = now_s

    def watch(self, lease: WaitingLease, num_ahead: int) -> None:
        """At each look at the time. num_ahead: pieces that may be before its own, if it has just moved itself."""
        if lease.watched_s != lease.progress_s:
            lease.watched_s = lease.progress_s
            lease.pass_limit = self._num_passed + 2 * num_ahead + _SPARE_PIECES

    def due_s(self, lease: WaitingLease) -> float:
        """Until when the answer that this lease awaits may stay away, as things stand."""
        if self.is_passed_over(lease):
            return lease.progress_s + self._lease_s
        return max(lease.progress_s, self._moved_s) + self._lease_s

    def is_passed_over(self, lease: WaitingLease) -> bool:
        """Whether more went by than can have been before it."""
        return self._num_passed > lease.pass_limit
