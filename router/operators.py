"""What an operator may ask of a worker through a router: another role, or to drain."""

from __future__ import annotations

import structlog

from pdserve.errors import InvalidRequest, UnknownWorker
from pdserve.messages import Drain, Role, SetRole
from router.fleet import Fleet
from router.member import Member
from router.scaling_notes import ScalingNotes

log = structlog.get_logger()


class Operators:
    """Event-loop thread only. Both orders return when they are on their way; the worker drains, then acts.

    scaling  what was told by whoever scales the cluster
    force    also if no other worker that takes work has the role that this one leaves
    """

    def __init__(self, fleet: Fleet, scaling: ScalingNotes) -> None:
        self._fleet = fleet
        self.scaling = scaling

    def set_role(self, worker_id: str, role: Role, *, force: bool = False) -> None:
        """Drain, then rejoin in another role. Raises UnknownWorker, or InvalidRequest with the reason."""
        member = self.find(worker_id)
        if member.hello.role is role:
            raise InvalidRequest("the worker has this role already", worker=worker_id, role=role.value)
        self._check_not_last(member, force)
        log.info(
            "worker.set_role", worker=worker_id, role=role.value, before=member.hello.role.value, force=force
        )
        member.send(SetRole(role))
        self._fleet.mark_draining(member)

    def drain(self, worker_id: str, *, force: bool = False) -> None:
        """Serve what is in hand, then end. Raises UnknownWorker, or InvalidRequest which says why not."""
        member = self.find(worker_id)
        self._check_not_last(member, force)
        log.info("worker.drain", worker=worker_id, role=member.hello.role.value, force=force)
        member.send(Drain())
        self._fleet.mark_draining(member)

    def find(self, worker_id: str) -> Member:
        """A worker that has joined. Raises UnknownWorker."""
        member = self._fleet.get(worker_id)
        if member is None:
            known = ", ".join(each.id for each in self._fleet.members[:16]) or "none"
            raise UnknownWorker("no such worker has joined this router", worker=worker_id, known=known)
        return member

    def _check_not_last(self, member: Member, force: bool) -> None:
        if not force and not member.draining and self._fleet.topology.is_last_of_role(member):
            raise InvalidRequest(
                "it is the last worker of its role that takes work: force it if that is meant",
                worker=member.id,
                role=member.hello.role.value,
            )
