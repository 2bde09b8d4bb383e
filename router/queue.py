"""The order of what waits for a pair: replays first, then by priority and age, in turn between users."""

from __future__ import annotations

import heapq
from collections.abc import Container, Iterator
from typing import Generic, Protocol, TypeVar

AGE_STEP_S = 10.0  # waiting so long is worth one step of priority


class Queued(Protocol):
    """What the order depends on.

    queued_s  when it (or the request it belongs to) began to wait; priority: the higher goes first
    """

    @property
    def queued_s(self) -> float: ...
    @property
    def priority(self) -> int: ...
    @property
    def user(self) -> str: ...
    @property
    def replay(self) -> bool: ...


T = TypeVar("T", bound=Queued)

_Heap = list[tuple[float, int, T]]


class _User(Generic[T]):
    """One user's own requests, and when it was its turn last."""

    def __init__(self, turn: int, now_s: float) -> None:
        self.heap: _Heap[T] = []
        self.turn = turn
        self.served_s = now_s


class FairQueue(Generic[T]):
    """Not thread-safe. Bounds are the owner's business.

    Within a user: priority, with age worth AGE_STEP_S a step, so the order never changes while waiting. Between
    users: the priority of their first ones, aged by how long the user has not been served; at equal level in turn.
    """

    def __init__(self) -> None:
        self._replays: _Heap[T] = []
        self._users: dict[str, _User[T]] = {}
        self._serial = 0
        self._turn = 0
        self._present: dict[T, None] = {}

    def __len__(self) -> int:
        return len(self._present)

    def __contains__(self, item: T) -> bool:
        return item in self._present

    def __iter__(self) -> Iterator[T]:
        """Everything that waits, in the order in which it came."""
        return iter(tuple(self._present))

    def push(self, item: T, now_s: float) -> None:
        """Let it wait."""
        self._serial += 1
        self._present[item] = None
        if item.replay:
            heapq.heappush(self._replays, (item.queued_s, self._serial, item))
            return
        user = self._users.get(item.user)
        if user is None:
            self._turn += 1
            user = self._users[item.user] = _User(self._turn, now_s)
        rank = item.queued_s - item.priority * AGE_STEP_S
        heapq.heappush(user.heap, (rank, self._serial, item))

    def remove(self, item: T) -> None:
        """It no longer waits; no error if it didn't."""
        if item not in self._present:
            return
        del self._present[item]
        if item.replay:
            _take_out(self._replays, item)
            return
        user = self._users[item.user]
        _take_out(user.heap, item)
        if not user.heap:
            del self._users[item.user]

    def served(self, item: T, now_s: float) -> None:
        """It has got what it waited for: remove it; its user goes to the end of the line."""
        user = None if item.replay else self._users.get(item.user)
        if user is not None:
            self._turn += 1
            user.turn = self._turn
            user.served_s = now_s
        self.remove(item)

    def num_ahead(self, item: T) -> int:
        """How many will be served before this one that waits, if nothing else comes."""
        if item.replay:
            return sum(1 for entry in self._replays if entry[:2] < self._entry(self._replays, item))
        own = self._users[item.user]
        mine = self._entry(own.heap, item)
        before = [entry[2] for entry in own.heap if entry[:2] < mine]
        turns = sum(1 for each in before if each.priority == item.priority)
        ahead = len(self._replays) + len(before)
        for name, user in self._users.items():
            if name == item.user:
                continue
            above = sum(1 for entry in user.heap if entry[2].priority > item.priority)
            equal = sum(1 for entry in user.heap if entry[2].priority == item.priority)
            ahead += above + min(equal, turns + (user.turn < own.turn))  # they take turns
        return ahead

    @staticmethod
    def _entry(heap: _Heap[T], item: T) -> tuple[float, int]:
        return next(entry[:2] for entry in heap if entry[2] is item)

    def first_replay(self, passed_over: Container[T] = ()) -> T | None:
        """The oldest replay that isn't in `passed_over`."""
        if not passed_over:
            return self._replays[0][2] if self._replays else None
        rest = [entry for entry in self._replays if entry[2] not in passed_over]
        return min(rest, key=lambda entry: entry[:2])[2] if rest else None

    def first_new(self, now_s: float, passed_over: Container[str] = ()) -> T | None:
        """Whose turn it is among the others; users in `passed_over` don't count."""
        best: _User[T] | None = None
        best_key = (0, 0)
        for name, user in self._users.items():
            if name in passed_over:
                continue
            head = user.heap[0][2]
            waits_s = now_s - max(head.queued_s, user.served_s)
            key = (-(head.priority + int(waits_s / AGE_STEP_S)), user.turn)
            if best is None or key < best_key:
                best, best_key = user, key
        return None if best is None else best.heap[0][2]


def _take_out(heap: _Heap[T], item: T) -> None:
    if heap[0][2] is item:
        heapq.heappop(heap)
        return
    heap[:] = [entry for entry in heap if entry[2] is not item]
    heapq.heapify(heap)
