"""The scaling actuator of one machine: child processes of the supervisor, each on a seat of its own."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import count
from typing import Protocol

from deploy.local.plan import ProcessSpec
from deploy.scaling.targets import SCALED, Counts
from pdserve.messages import Role

MakeWorker = Callable[[str, str, int], ProcessSpec]
"""Of a role, a name and a seat: its cores, and its place in the row of metrics' ports."""


class Processes(Protocol):
    """The supervisor, as far as scaling uses it."""

    @property
    def worker_ids(self) -> Sequence[str]:
        """Of all that there are, those included that drain."""
        ...

    def add(self, spec: ProcessSpec) -> None: ...

    def remove(self, worker_id: str) -> None: ...

    def replace(self, spec: ProcessSpec) -> None: ...


class LocalWorkers:
    """Implements `Actuator`. Event-loop thread only.

    order_role  tells a worker to drain and rejoin in another role
    """

    def __init__(
        self,
        processes: Processes,
        workers: Sequence[ProcessSpec],
        make: MakeWorker,
        order_role: Callable[[str, Role], Awaitable[None]],
    ) -> None:
        self._processes = processes
        self._make = make
        self._order_role = order_role
        self._roles = {
            spec.id: Role(spec.role) for spec in workers
        }  # of those wanted, in order of their start
        self._seats = {spec.id: seat for seat, spec in enumerate(workers)}  # of those that drain too

    @property
    def counts(self) -> Counts:
        """See `Actuator`."""
        roles = list(self._roles.values())
        return Counts(prefill=roles.count(Role.PREFILL), decode=roles.count(Role.DECODE))

    async def scale(self, counts: Counts, victims: Mapping[Role, Sequence[str]]) -> None:
        """See `Actuator`."""
        for role in SCALED:
            ids = [worker_id for worker_id, its in self._roles.items() if its is role]
            for _ in range(counts.of(role) - len(ids)):
                self._add(role)
            ready = victims.get(role, ())
            going = [worker_id for worker_id in reversed(ids) if worker_id not in ready]  # the newest first
            going += [worker_id for worker_id in ready if worker_id in ids]
            for worker_id in going[: max(0, len(ids) - counts.of(role))]:
                del self._roles[worker_id]
                self._processes.remove(worker_id)

    async def set_role(self, worker_id: str, role: Role) -> None:
        """See `Actuator`."""
        await self._order_role(worker_id, role)
        self._roles[worker_id] = role
        self._processes.replace(self._make(role.value, worker_id, self._seats[worker_id]))

    def _add(self, role: Role) -> None:
        """On the first free seat, under the first free name: of one that still drains neither is free."""
        there = set(self._processes.worker_ids) | set(self._roles)
        self._seats = {worker_id: seat for worker_id, seat in self._seats.items() if worker_id in there}
        taken = set(self._seats.values())
        seat = next(seat for seat in count() if seat not in taken)
        name = next(name for number in count() if (name := f"{role.value}-{number}") not in there)
        spec = self._make(role.value, name, seat)
        self._roles[name], self._seats[name] = role, seat
        self._processes.add(spec)
