"""The order in which a running cluster becomes another one. Pure; whoever runs the processes carries it out.

While old and new processes understand each other, one is started, and then an old one drained: decode workers before
prefill workers, so that whoever offers KV meets somebody who knows at least as much; routers last, since they speak
with all of them. Where links would refuse mixed pairs, the new pools are complete before the first old worker drains.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import Enum

from pdserve.wire_version import WireVersion, text

ROUTER, DECODE, BOTH, PREFILL = "router", "decode", "both", "prefill"
WORKERS = (DECODE, BOTH, PREFILL)


class Verb(Enum):
    """START and DRAIN are done when what was started is ready, or what was drained has ended. SWITCH: clients are led
    to the new routers from now on.
    """

    START = "start"
    DRAIN = "drain"
    SWITCH = "switch"


@dataclass(frozen=True, slots=True, kw_only=True)
class KvKind:
    """What both workers of a pair must have in common. model: name and version of the weights."""

    model: str
    dtype: str
    block_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """One state of a cluster.

    wire       that its processes speak
    processes  by role: what makes a process of it another one than before (image, command line, settings), as a text
    counts     by role: how many
    """

    wire: WireVersion
    kv: KvKind
    processes: Mapping[str, str]
    counts: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class UpgradeStep:
    """One change; the next begins when it is done.

    count  of START: new processes of the role there are then; of DRAIN: old ones
    """

    verb: Verb
    role: str
    count: int
    why: str


def plan_upgrade(old: Release, new: Release) -> tuple[UpgradeStep, ...]:
    """All steps from one to the other; none where only numbers differ, which is scaling's matter."""
    changed = [
        role
        for role in (*WORKERS, ROUTER)
        if (old.counts.get(role) or new.counts.get(role))
        and old.processes.get(role) != new.processes.get(role)
    ]
    if reason := _needs_routers(old, new):
        return tuple(_second_cluster(old, new, reason))
    if reason := _differs(old.kv, new.kv):
        routers = [step for role in changed if role == ROUTER for step in _roll(role, old, new)]
        return (*_second_pools(old, new, reason), *routers)
    return tuple(step for role in changed for step in _roll(role, old, new))


def next_step(
    steps: Sequence[UpgradeStep], old: Mapping[str, int], new: Mapping[str, int], *, switched: bool
) -> UpgradeStep | None:
    """The first that isn't done: an upgrade that was interrupted, or lost a process, goes on from where it is.

    old, new  by role: processes that there are of the old and of the new release
    """
    for step in steps:
        match step.verb:
            case Verb.START:
                done = new.get(step.role, 0) >= step.count
            case Verb.DRAIN:
                done = old.get(step.role, 0) <= step.count
            case Verb.SWITCH:
                done = switched
        if not done:
            return step
    return None


def _roll(role: str, old: Release, new: Release) -> Iterator[UpgradeStep]:
    """One more than before at most, and never fewer than the smaller of both numbers."""
    num_old, num_new = old.counts.get(role, 0), new.counts.get(role, 0)
    for done in range(max(num_old, num_new)):
        if done < num_new:
            yield UpgradeStep(Verb.START, role, done + 1, f"{role}s one at a time: the wire versions agree")
        if done < num_old:
            yield UpgradeStep(Verb.DRAIN, role, num_old - done - 1, f"a new {role} has taken its place")


def _second_pools(old: Release, new: Release, reason: str) -> Iterator[UpgradeStep]:
    """Under the same routers, which send work to whatever pair is up."""
    for role in WORKERS:
        if new.counts.get(role):
            yield UpgradeStep(
                Verb.START, role, new.counts[role], f"a second pool, since links refuse mixed pairs: {reason}"
            )
    yield from _end(old, (PREFILL, BOTH, DECODE), "the new pools serve")


def _second_cluster(old: Release, new: Release, reason: str) -> Iterator[UpgradeStep]:
    for role in (ROUTER, *WORKERS):
        if new.counts.get(role):
            yield UpgradeStep(Verb.START, role, new.counts[role], f"a second cluster: {reason}")
    yield UpgradeStep(Verb.SWITCH, ROUTER, new.counts.get(ROUTER, 0), "the new cluster serves")
    yield from _end(old, (ROUTER, PREFILL, BOTH, DECODE), "no client is led there any longer")


def _end(old: Release, roles: Sequence[str], why: str) -> Iterator[UpgradeStep]:
    """Prefill before decode workers: what was handed over runs to its end."""
    for role in roles:
        if old.counts.get(role):
            yield UpgradeStep(Verb.DRAIN, role, 0, why)


def _needs_routers(old: Release, new: Release) -> str:
    """Why the routers can't serve both; "" = they can."""
    if old.kv.model != new.kv.model:
        return f"a router serves one model, not {old.kv.model} and {new.kv.model}"
    if old.wire[0] != new.wire[0] or abs(old.wire[1] - new.wire[1]) > 1:
        return f"wire {text(old.wire)} and {text(new.wire)} are too far apart"
    return ""


def _differs(old: KvKind, new: KvKind) -> str:
    """Which of it, with both values; "" = nothing."""
    return ", ".join(
        f"{field.name} {getattr(old, field.name)} and {getattr(new, field.name)}"
        for field in fields(old)
        if getattr(old, field.name) != getattr(new, field.name)
    )
