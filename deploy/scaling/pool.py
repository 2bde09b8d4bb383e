"""One pool within one decision: when it may grow, when one of its workers may leave, and why not. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from deploy.scaling.demand import PoolDemand
from deploy.scaling.observe import Observed
from deploy.scaling.targets import ScalingTargets
from pdserve.messages import Role


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolHistory:
    """Of one pool; -inf = never.

    over_since_s, calm_since_s  since when it has been over its limits, or one worker too many, without a break
    starting_since_s  since when fewer are ready than were asked for; settled_s: when that was so last
    shrunk_s          when it last lost a worker
    too_few           this many were not enough; none so small again before guarded_until_s
    """

    over_since_s: float | None = None
    calm_since_s: float | None = None
    starting_since_s: float | None = None
    settled_s: float = -math.inf
    changed_s: float = -math.inf
    shrunk_s: float = -math.inf
    too_few: int = 0
    guarded_s: float = 0.0
    guarded_until_s: float = -math.inf


class PoolControl:
    """Begins with what was asked for; each of `give`, `grow` and `settle` may change it, and the history with it."""

    def __init__(
        self,
        seen: Observed,
        role: Role,
        asked: int,
        targets: ScalingTargets,
        demand: PoolDemand,
        before: PoolHistory,
    ) -> None:
        self._how, self._range, self._demand = targets.how, targets.range_of(role), demand
        self._role, self._asked, self._now_s = role, asked, seen.at_s
        self._num_ready = seen.pool(role).num_ready
        self.count = asked
        self.history = self._watch(before, seen)
        self._did = ""

    def _watch(self, before: PoolHistory, seen: Observed) -> PoolHistory:
        """What this look adds to the history, whatever is decided."""
        now_s, starting = self._now_s, self._num_ready < self._asked

        def since(before_s: float | None, holds: bool) -> float | None:
            return (now_s if before_s is None else before_s) if holds else None

        return replace(
            before,
            over_since_s=since(before.over_since_s, self._demand.wanted > self._asked),
            calm_since_s=since(before.calm_since_s, self._demand.spare and seen.complete and not starting),
            starting_since_s=since(before.starting_since_s, starting),
            settled_s=now_s if starting else before.settled_s,
        )

    @property
    def changed(self) -> bool:
        return bool(self._did)

    @property
    def sentence(self) -> str:
        """What became of it, and why."""
        what = f"{self._role.value} {self._asked}"
        return f"{what} → {self.count}: {self._did}" if self._did else f"{what}: {self._why_not}"

    # --- what may be done

    @property
    def grows(self) -> bool:
        """Whether it needs more and may have them, for long enough, and what was added before had its chance."""
        return self._range.most > self._asked < self._demand.wanted and not self._growth_waits

    @property
    def _growth_waits(self) -> str:
        """What more workers wait for; "" = nothing."""
        how, now_s, history = self._how, self._now_s, self.history
        since_s = history.over_since_s
        if since_s is None or now_s - since_s < how.grow_after_s:
            return f"over its limits for less than {how.grow_after_s:g} s"
        started_s = history.starting_since_s
        if started_s is not None and now_s - started_s < how.start_limit_s:
            return f"{self._asked - self._num_ready} still to come"
        last_s = history.changed_s if started_s is not None else max(history.settled_s, history.changed_s)
        if now_s - last_s < how.cool_down_up_s:
            return f"what was done last has had less than {how.cool_down_up_s:g} s to act"
        return ""

    @property
    def gives(self) -> bool:
        """Whether one of its workers may leave for the other pool: sooner than it would be ended."""
        return not self._stays(self._how.cool_down_up_s)

    def _stays(self, calm_s: float) -> str:
        """Why none may leave; "" = one may, after it was one too many for so long."""
        how, now_s, history = self._how, self._now_s, self.history
        if self._asked - 1 < self._range.least:
            return "it has its least"
        if self._num_ready < self._asked:
            return f"{self._asked - self._num_ready} still to come"
        if self._asked - 1 <= history.too_few and now_s < history.guarded_until_s:
            return f"{history.too_few} proved too few"
        if history.calm_since_s is None or now_s - history.calm_since_s < calm_s:
            return "all are needed" if history.calm_since_s is None else f"idle for less than {calm_s:g} s"
        if now_s - history.changed_s < how.cool_down_down_s:
            return f"changed less than {how.cool_down_down_s:g} s ago"
        return ""

    @property
    def _why_not(self) -> str:
        """Why nothing is done: the figures, and what it waits for if it is not at ease."""
        waits = ""
        if self._demand.wanted > self._asked:
            full = self._asked >= self._range.most
            waits = f"; it has its most, {self._range.most}" if full else f"; {self._growth_waits}"
        elif self._demand.spare and (stays := self._stays(self._how.cool_down_down_s)):
            waits = f"; one would be spare, but {stays}"
        return self._demand.says + waits

    # --- doing it

    def settle(self) -> None:
        """Grow or shrink, unless roles have changed."""
        least, most = self._range.least, self._range.most
        if self.count < least:
            self._to(min(least, self.count + self._how.max_step), f"it must have {least}")
        elif self.count > most:
            self._to(self.count - 1, f"it may have {most}")
        elif self.grows:
            self.grow(min(most, self._demand.wanted, self._asked + self._how.max_step) - self.count)
        elif not self._did and not self._stays(self._how.cool_down_down_s):
            self._to(self.count - 1, f"one is spare: {self._demand.says}")

    def grow(self, by: int) -> None:
        """By so many more."""
        self._guard()
        self._to(self.count + by, self._demand.says)

    def give(self, role: Role) -> None:
        """One leaves for the other pool."""
        self._to(self.count - 1, f"one changes to {role.value}: {self._demand.says}")

    def _to(self, count: int, did: str) -> None:
        shrinks = count < self.count
        self.count, self._did = count, did
        self.history = replace(
            self.history,
            changed_s=self._now_s,
            shrunk_s=self._now_s if shrinks else self.history.shrunk_s,
            over_since_s=None,
            calm_since_s=None,
            starting_since_s=None,
        )

    def _guard(self) -> None:
        """It grows from a number that it shrank to of late: that one doesn't do, whatever the figures said."""
        history, now_s = self.history, self._now_s
        if now_s - history.shrunk_s <= max(self._how.guard_s, history.guarded_s):
            guarded_s = max(self._how.guard_s, 2 * history.guarded_s)
            self.history = replace(
                history, too_few=self._asked, guarded_s=guarded_s, guarded_until_s=now_s + guarded_s
            )
