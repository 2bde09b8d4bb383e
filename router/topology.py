"""What the workers that are here add up to: pairs that can be used, workers that can do alone, what is missing."""

from __future__ import annotations

from collections.abc import Mapping

from pdserve.messages import Role
from router.member import Member

PREFILL, DECODE, PAIR = "prefill", "decode", "pair"


class Topology:
    """A view of the fleet's members. Event-loop thread only.

    allow_local_prefill  whether decode workers may prefill for themselves; role `both` always may
    """

    def __init__(self, members: Mapping[str, Member], *, allow_local_prefill: bool) -> None:
        self._members = members
        self._allow_local_prefill = allow_local_prefill

    @property
    def members(self) -> tuple[Member, ...]:
        """All of them, in the order in which they joined."""
        return tuple(self._members.values())

    @property
    def num_links(self) -> int:
        """Pairs that may be up: at least as many as are."""
        return sum(len(member.pairs) for member in self._members.values())

    def usable_prefills(self) -> list[Member]:
        """Prefill workers that take work."""
        return [member for member in self._members.values() if member.prefills and member.usable]

    def usable_decodes(self) -> list[Member]:
        """Workers that decode and take work."""
        return [member for member in self._members.values() if member.decodes and member.usable]

    def linked(self, prefill: Member) -> list[Member]:
        """Decode workers that take work and whose pair with this prefill worker is up."""
        linked = []
        for record in prefill.pairs.values():
            decode = self._members.get(record.decode.id)
            if record.up and decode is not None and decode.ref == record.decode and decode.usable:
                linked.append(decode)
        return linked

    def usable_pairs(self) -> list[tuple[Member, Member]]:
        """(prefill, decode) pairs that are up between workers that take work."""
        return [(prefill, decode) for prefill in self.usable_prefills() for decode in self.linked(prefill)]

    def usable_alone(self) -> list[Member]:
        """Workers that may prefill for themselves."""
        return [
            member
            for member in self._members.values()
            if member.usable
            and member.decodes
            and (self._allow_local_prefill or member.hello.role is Role.BOTH)
            and self._may_fit(member)
        ]

    def _may_fit(self, decode: Member) -> bool:
        """Whether it fits the cluster, as far as its links have shown: one that doesn't is given no work at all."""
        records = [
            record
            for prefill in self._members.values()
            if prefill.prefills and prefill.usable
            for record in (prefill.pairs.get(decode.id),)
            if record is not None and record.decode == decode.ref
        ]
        if any(record.up for record in records):
            return True
        return not any(record.undecided or record.misfits for record in records)

    @property
    def missing(self) -> str:
        """What keeps every request waiting: "prefill", "decode", "pair", or "" if there is a way."""
        if self.usable_alone() or self.usable_pairs():
            return ""
        usable = [member for member in self._members.values() if member.usable]
        if not any(member.decodes for member in usable):
            return DECODE
        if not any(member.prefills for member in usable):
            return PREFILL
        return PAIR

    def pair_reasons(self) -> str:
        """Why no pair is up, for the message to a client: "p0>d0: reason; …", the first few."""
        reasons = [
            f"{member.id}>{record.decode.id}: {record.reason or 'down'}"
            for member in self._members.values()
            for record in member.pairs.values()
            if not record.up
        ]
        return "; ".join(reasons[:4])

    @property
    def num_prefills(self) -> int:
        """Workers that compute prompts: prefill workers, or those that prefill for themselves if there is none."""
        prefills = sum(1 for member in self._members.values() if member.prefills and member.usable)
        return prefills or len(self.usable_alone())

    def is_last_of_role(self, member: Member) -> bool:
        """Whether no other worker that takes work has its role."""
        return not any(
            other.usable and other.hello.role is member.hello.role
            for other in self._members.values()
            if other is not member
        )
