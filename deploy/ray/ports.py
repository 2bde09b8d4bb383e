"""What the keeper needs of Ray: a place for its cluster's description, and hosts by name."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from deploy.ray.host import HostReport, Prepared, ProcessEnd
from deploy.ray.spec import RayCluster


class HostLost(Exception):
    """The host is dead, or can't be reached; the text says how it ended."""


class Host(Protocol):
    """A host somewhere, as `ProcessHost`; every method raises HostLost."""

    async def prepare(self, cluster: RayCluster, process: str, routers: Sequence[str]) -> Prepared:
        """Returns once Ray has found a place for it."""
        ...

    async def run(self) -> ProcessEnd: ...
    async def report(self) -> HostReport: ...
    async def set_routers(self, routers: Sequence[str]) -> None: ...
    async def drain(self, limit_s: float) -> ProcessEnd | None: ...


class Hosts(Protocol):
    """The hosts of one cluster, by the id of their process."""

    async def names(self) -> set[str]:
        """Of all that live."""
        ...

    async def find(self, process: str) -> Host | None:
        """The one that lives."""
        ...

    async def find_or_create(self, process: str, cluster: RayCluster) -> Host:
        """The one that lives, else a new one, for which Ray finds a place later. Raises HostLost."""
        ...

    async def end(self, process: str) -> None:
        """Kill it with its process; no error if there is none. Its name is free afterwards, or soon."""
        ...

    async def reserve(self, cluster: RayCluster | None, used: Collection[str]) -> None:
        """Ask for as many machines as all clusters need, and free the places kept for pairs that aren't used.

        used  processes that there are or are to be
        """
        ...


class Store(Protocol):
    """Where a keeper that comes back finds its cluster."""

    async def load(self) -> RayCluster | None: ...
    async def save(self, cluster: RayCluster) -> None: ...
    async def delete(self) -> None: ...
