"""The live leases of one end of one link, and a bounded memory of those that ended."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

from pdserve.errors import InvariantViolated, Stale

_MAX_REMEMBERED = 4096


class Lease(Protocol):
    """What the table needs of a lease."""

    @property
    def lease_id(self) -> int: ...


L = TypeVar("L", bound=Lease)


class LeaseTable(Generic[L]):
    """A lease that has ended never lives again under its id: whatever names it then is stale."""

    def __init__(self) -> None:
        self._live: dict[int, L] = {}
        self._ended: dict[int, None] = {}

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[L]:
        """In the order of opening; over a copy, so that leases may end meanwhile."""
        return iter(list(self._live.values()))

    def __contains__(self, lease_id: int) -> bool:
        return lease_id in self._live

    def open(self, lease: L) -> None:
        """Raises InvariantViolated if the id is live."""
        if lease.lease_id in self._live:
            raise InvariantViolated("a lease id used twice", lease_id=lease.lease_id)
        self._live[lease.lease_id] = lease

    def get(self, lease_id: int) -> L | None:
        return self._live.get(lease_id)

    def live(self, lease_id: int) -> L:
        """Raises Stale."""
        lease = self._live.get(lease_id)
        if lease is None:
            raise Stale("not a live lease", lease_id=lease_id)
        return lease

    def end(self, lease_id: int) -> None:
        """The lease is over; its id is remembered."""
        del self._live[lease_id]
        self._ended[lease_id] = None
        if len(self._ended) > _MAX_REMEMBERED:
            del self._ended[next(iter(self._ended))]

    def has_ended(self, lease_id: int) -> bool:
        """Whether the id is known to be over (the oldest ids are forgotten)."""
        return lease_id in self._ended
