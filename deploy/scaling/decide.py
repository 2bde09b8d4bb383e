"""One decision: from what is seen, what was asked for, and what was decided before. Pure.

A pool grows when it has been over its limits for `grow_after_s`, by at most `max_step`, and again only when what was
added is ready and has had `cool_down_up_s` to act. It shrinks by one when one fewer has been enough for
`cool_down_down_s`. A number that proved too few is not gone back to for a while, and then for twice as long. Where one
pool is over its limits and the other idles, a worker changes its role.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from deploy.scaling.demand import Known, decode_demand, prefill_demand
from deploy.scaling.observe import Observed
from deploy.scaling.pool import PoolControl, PoolHistory
from deploy.scaling.targets import SCALED, Counts, ScalingTargets
from pdserve.messages import Role

_SMOOTHED_S = 20.0  # over which the rate of prompt tokens is averaged
_OTHER = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}


@dataclass(frozen=True, slots=True)
class RoleChange:
    """This worker leaves its role for another."""

    worker_id: str
    role: Role


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What to do now.

    counts     workers to have, changed roles included
    set_roles  to be done first
    why        for people, in a sentence for each pool; change: of those that change only, "" = none does
    """

    counts: Counts
    set_roles: tuple[RoleChange, ...] = ()
    why: str
    change: str = ""

    @property
    def changed(self) -> bool:
        """Whether there is anything to do."""
        return bool(self.change)


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """What later decisions need to know of earlier ones; begins empty, so whoever decides may be restarted."""

    seen_s: float | None = None
    known: Known = field(default_factory=Known)
    pools: Mapping[Role, PoolHistory] = field(
        default_factory=lambda: {role: PoolHistory() for role in SCALED}
    )

    def blind(self) -> History:
        """After a look at which nobody answered: patience starts over, since what went on meanwhile isn't known."""
        pools = {
            role: replace(pool, over_since_s=None, calm_since_s=None) for role, pool in self.pools.items()
        }
        return replace(self, seen_s=None, pools=pools)


def decide(
    seen: Observed, asked: Counts, targets: ScalingTargets, history: History
) -> tuple[Decision, History]:
    """What to do after a look, and the history for the next.

    asked  what the actuator was last asked for, changed roles included
    """
    how, known = targets.how, _learn(seen, history)
    demands = {
        Role.PREFILL: prefill_demand(seen, known, how),
        Role.DECODE: decode_demand(seen, known, how),
    }
    pools = {
        role: PoolControl(seen, role, asked.of(role), targets, demands[role], history.pools[role])
        for role in SCALED
    }
    set_roles: list[RoleChange] = []
    for role in SCALED:
        short, other = pools[role], pools[_OTHER[role]]
        if how.change_roles and not set_roles and short.grows and other.gives:
            other.give(role)
            short.grow(1)
            set_roles.append(RoleChange(seen.victims(_OTHER[role])[0], role))
    for pool in pools.values():
        pool.settle()
    decision = Decision(
        counts=Counts(prefill=pools[Role.PREFILL].count, decode=pools[Role.DECODE].count),
        set_roles=tuple(set_roles),
        why="; ".join(pool.sentence for pool in pools.values()),
        change="; ".join(pool.sentence for pool in pools.values() if pool.changed),
    )
    later = History(seen_s=seen.at_s, known=known, pools={role: pool.history for role, pool in pools.items()})
    return decision, later


def _learn(seen: Observed, history: History) -> Known:
    known = history.known
    rate = seen.pool(Role.PREFILL).tokens_per_s
    step_s = seen.pool(Role.DECODE).step_s
    return Known(
        tokens_per_s=rate or known.tokens_per_s,
        prompt_tokens_per_s=_smooth(seen, history),
        least_step_s=min(known.least_step_s, step_s) if step_s > 0 else known.least_step_s,
    )


def _smooth(seen: Observed, history: History) -> float | None:
    now, before = seen.prompt_tokens_per_s, history.known.prompt_tokens_per_s
    if now is None or before is None or history.seen_s is None:
        return before if now is None else now
    kept = math.exp(-max(0.0, seen.at_s - history.seen_s) / _SMOOTHED_S)
    return kept * before + (1 - kept) * now
