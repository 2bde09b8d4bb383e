"""What is assumed of a worker before it was observed, or when that was long ago: what the others of its role take.

Absence of data says nothing bad of a worker. One that has computed nothing is taken for the median of its role, so it
is as likely to be chosen as the others, and is soon observed. Where workers have told their prefill rates of late, a
slower one is taken for as much slower. What nobody was observed at is guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from router.fitted_lines import SCALE, Line, Prior
from router.member import Member

LOOK_S = 0.25  # so long is what workers lend each other used before it is looked at again
STALE_RATE_S = 30.0  # a rate told longer ago by a worker that has been idle since says nothing
TRIP = Prior(0.001)
HANDOVER = Prior(0.002, 1e-5)


@dataclass(frozen=True, slots=True, kw_only=True)
class CostParameters:
    """What estimates begin at, and what can't be observed."""

    prefill_tokens_per_s: float = 2_000.0  # before any worker has told its own
    busy_slowdown: float = (
        3.0  # of a local prefill beside running streams: it gets a small chunk in each step
    )
    trip: Prior = TRIP
    handover: Prior = HANDOVER
    other_host: float = 2.0  # moving KV costs so many times more
    step_s: float = 0.02
    sequence: float = 0.1  # of a step, for each sequence on a decode worker
    no_room_s: float = 1.0  # for blocks that aren't free now
    used_pool_s: float = 0.01  # for a pool that is all in use
    avoid_s: float = 10.0  # for a pair on which this request failed before


@dataclass(frozen=True, slots=True)
class _Lent:
    """A worker's line, and the rate that it had told by then; 0 = none."""

    line: Prior
    tokens_per_s: float = 0.0

    @property
    def level(self) -> float:
        return self.line.base_s + self.line.slope_s * SCALE


class Priors:
    """Event-loop thread only."""

    def __init__(self, parameters: CostParameters) -> None:
        self.parameters = parameters
        self._looked: tuple[float, int] | None = None  # when, at how many
        self._lent: dict[tuple[str, str], _Lent] = {}  # by role and kind of line
        self._handover: dict[bool, _Lent] = {}  # by whether it goes to another host
        self._step_s: dict[str, float] = {}  # by role

    def look(self, members: Sequence[Member], now_s: float) -> None:
        """See what the workers take now, if that was long ago or others are here."""
        if self._looked is not None:
            looked_s, num_members = self._looked
            if now_s - looked_s < LOOK_S and num_members == len(members):
                return
        self._looked = (now_s, len(members))
        self._lent, self._handover, self._step_s = {}, {}, {}
        by_role: dict[str, list[Member]] = {}
        for member in members:
            by_role.setdefault(member.hello.role.value, []).append(member)
        for role, alike in by_role.items():
            for kind, line_of in _LINES.items():
                self._lend((role, kind), alike, line_of, now_s)
            steps_s = sorted(
                each.accounting.load.step_s
                for each in alike
                if each.accounting.load is not None and each.accounting.load.step_s > 0
            )
            if steps_s:
                self._step_s[role] = steps_s[(len(steps_s) - 1) // 2]
        self._lend_handovers(members, now_s)

    def _lend(
        self, key: tuple[str, str], alike: Iterable[Member], line_of: Callable[[Member], Line], now_s: float
    ) -> None:
        lent = [
            _Lent(line_of(each).fitted(self._own(each, key[1], now_s), now_s), told_rate(each, now_s))
            for each in alike
            if line_of(each).known(now_s)
        ]
        if lent:
            self._lent[key] = _median(lent)

    def _lend_handovers(self, members: Sequence[Member], now_s: float) -> None:
        hosts = {member.ref: member.hello.host_id for member in members}
        lent: dict[bool, list[_Lent]] = {}
        for prefill in members:
            for record in prefill.pairs.values():
                if record.decode in hosts and record.handover.known(now_s):
                    is_far = hosts[record.decode] != prefill.hello.host_id
                    line = record.handover.fitted(self._guessed_handover(is_far), now_s)
                    lent.setdefault(is_far, []).append(_Lent(line))
        self._handover = {is_far: _median(lines) for is_far, lines in lent.items()}

    # --- of one worker, or pair

    def queue(self, member: Member, now_s: float) -> Prior:
        """Waiting for others' prefill."""
        return self._of(member, "queue", now_s)

    def prefill(self, member: Member, now_s: float) -> Prior:
        """Computing a prompt, nothing else running."""
        return self._of(member, "prefill", now_s)

    def busy(self, member: Member, now_s: float) -> Prior:
        """The same beside running streams."""
        return self._of(member, "busy", now_s)

    def trip(self, member: Member, now_s: float) -> Prior:
        """From here to the worker and back."""
        return self._of(member, "trip", now_s)

    def handover(self, prefill: Member, decode: Member, now_s: float) -> Prior:
        """What moving the KV takes beyond the prefill that it overlaps with."""
        is_far = prefill.hello.host_id != decode.hello.host_id
        record = prefill.pairs.get(decode.id)
        lent = self._handover.get(is_far)
        if lent is None or (record is not None and record.handover.known(now_s)):
            return self._guessed_handover(is_far)
        return lent.line

    def step_s(self, decode: Member) -> float:
        """A step of a decode worker."""
        load = decode.accounting.load
        if load is not None and load.step_s > 0:
            return load.step_s
        return self._step_s.get(decode.hello.role.value, self.parameters.step_s)

    def _of(self, member: Member, kind: str, now_s: float) -> Prior:
        lent = self._lent.get((member.hello.role.value, kind))
        if lent is None or _LINES[kind](member).known(now_s):
            return self._own(member, kind, now_s)
        told = told_rate(member, now_s)
        if kind == "trip" or told <= 0 or lent.tokens_per_s <= 0:
            return lent.line
        slower = lent.tokens_per_s / told
        return Prior(lent.line.base_s * slower, lent.line.slope_s * slower)

    def _own(self, member: Member, kind: str, now_s: float) -> Prior:
        """By its own report, or guessed."""
        if kind == "trip":
            return self.parameters.trip
        load = member.accounting.load
        told = load.prefill_tokens_per_s if load is not None else 0.0
        slope_s = 1.0 / (told if told > 0 else self.parameters.prefill_tokens_per_s)
        return Prior(0.0, slope_s * (self.parameters.busy_slowdown if kind == "busy" else 1.0))

    def _guessed_handover(self, is_far: bool) -> Prior:
        way, times = self.parameters.handover, self.parameters.other_host if is_far else 1.0
        return Prior(way.base_s, way.slope_s * times)


def told_rate(member: Member, now_s: float) -> float:
    """The prefill rate that it tells, if that is of late or it has work; else 0."""
    accounting = member.accounting
    if accounting.load is None:
        return 0.0
    is_new = now_s - accounting.rate_told_s <= STALE_RATE_S or accounting.num_queued_tokens > 0
    return accounting.load.prefill_tokens_per_s if is_new else 0.0


def _median(lent: list[_Lent]) -> _Lent:
    return sorted(lent, key=lambda each: each.level)[(len(lent) - 1) // 2]


_LINES: dict[str, Callable[[Member], Line]] = {
    "queue": lambda member: member.fits.queue,
    "prefill": lambda member: member.fits.prefill,
    "busy": lambda member: member.fits.prefill_busy,
    "trip": lambda member: member.fits.trip,
}
