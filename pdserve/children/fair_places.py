"""Who waits for a child, and who is next: users in turn, and the one with most waiting makes room."""

from __future__ import annotations

import asyncio
from collections import deque

from pdserve.errors import Overloaded

Place = asyncio.Future[None]
"""Resolved when it is its turn; Overloaded: it made room for another user's."""


class FairPlaces:
    """Event loop only. Whoever waited and was cancelled is passed over.

    most  that may wait
    name  of what they wait for, in errors
    """

    def __init__(self, most: int, name: str) -> None:
        self._most = most
        self._name = name
        self._by_user: dict[str, deque[Place]] = {}  # the user whose turn is next comes first

    def wait(self, user: str) -> Place:
        """A place at the end of this user's. Raises Overloaded if all are taken and nobody has more than this one."""
        self._forget_gone()
        own = len(self._by_user.get(user, ()))
        if sum(map(len, self._by_user.values())) >= self._most:
            greediest = max(self._by_user.values(), key=len)
            if len(greediest) <= own + 1:
                raise self._full()
            greediest.pop().set_exception(self._full())
        place: Place = asyncio.get_running_loop().create_future()
        self._by_user.setdefault(user, deque()).append(place)
        return place

    def call_next(self) -> bool:
        """It is the next one's turn; False if nobody waits."""
        self._forget_gone()
        if not self._by_user:
            return False
        user = next(iter(self._by_user))
        places = self._by_user.pop(user)
        places.popleft().set_result(None)
        if places:
            self._by_user[user] = places
        return True

    def _forget_gone(self) -> None:
        for user, places in list(self._by_user.items()):
            left = deque(place for place in places if not place.done())
            if left:
                self._by_user[user] = left
            else:
                del self._by_user[user]

    def _full(self) -> Overloaded:
        return Overloaded(f"too many requests wait for {self._name}", limit=self._most)
