"""Where an attempt goes: filter, score, pick, over pairs that are up and workers that may prefill for themselves.

Between a pair and a worker alone: a prompt of `remote_prefill_tokens` or more goes to a pair; a shorter one only if
that is cheaper by the estimate, what it would cost the streams on the decode worker included. Among those that cost
about the same, one on a single host is taken; then whoever got the fewest of late; then one by a draw.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from pdserve.clock import Clock
from pdserve.ids import Random
from router.attempt_need import Need
from router.explain import CHOSEN, Verdict
from router.fleet import Fleet
from router.member import Member
from router.priors import CostParameters, Priors
from router.scoring import Cost, Scoring, num_running

ABOUT = 0.1  # of the best score: estimates aren't better than that …
ABOUT_S = 0.0005  # … nor than that …
# Requests that a decode worker is asked to grant at a time, so that it always has the next one. More would only stand
# in its list instead of the router's queue, or be refused and asked again.
MOST_ASKING = 32
CHANCE = 2.0  # … nor than so many standard errors of what was observed


@dataclass(frozen=True, slots=True)
class Expected:
    """What the estimate was made from, to learn from what really comes.

    num_queued   prompt tokens queued where it prefills, before this one
    num_running  streams on a worker that prefills for itself
    """

    num_queued: int
    num_running: int
    num_uncached: int
    num_sent: int


@dataclass(frozen=True, slots=True)
class Placement:
    """A pair, or (prefill None) a decode worker alone."""

    prefill: Member | None
    decode: Member
    cost: Cost
    expected: Expected
    explain: tuple[Verdict, ...]


@dataclass(frozen=True, slots=True)
class NotNow:
    """No candidate.

    for_all      nothing about this request is to blame, others would fare no better
    fits_nobody  there are candidates, and all their windows are too small
    """

    for_all: bool
    fits_nobody: bool
    explain: tuple[Verdict, ...]


class _Candidate(NamedTuple):  # see Verdict
    prefill: Member | None
    decode: Member
    cost: Cost

    @property
    def is_far(self) -> bool:
        return self.prefill is not None and self.prefill.hello.host_id != self.decode.hello.host_id

    def recent(self, now_s: float) -> float:
        prefill = 0.0 if self.prefill is None else self.prefill.accounting.recent(now_s)
        return prefill + self.decode.accounting.recent(now_s)


class Placer:
    """Event-loop thread only.

    remote_prefill_tokens  see above; 0 = the estimate alone decides
    """

    def __init__(
        self,
        fleet: Fleet,
        clock: Clock,
        random: Random,
        *,
        remote_prefill_tokens: int = 0,
        parameters: CostParameters | None = None,
    ) -> None:
        self._fleet = fleet
        self._clock = clock
        self._random = random
        self._remote_prefill_tokens = remote_prefill_tokens
        self.priors = Priors(parameters if parameters is not None else CostParameters())

    def place(self, need: Need) -> Placement | NotNow:
        """Choose for one attempt; books nothing."""
        scoring = self._scoring(need)
        fallen: list[Verdict] = []
        own_fault = False
        possible: list[_Candidate] = []
        pairs = self._fleet.topology.usable_pairs()
        candidates = [*pairs, *((None, member) for member in self._fleet.topology.usable_alone())]
        for prefill, decode in candidates:
            reason, own = self._why_not(need, prefill, decode, pairs_exist=bool(pairs))
            if reason:
                own_fault = own_fault or own
                fallen.append(Verdict("" if prefill is None else prefill.id, decode.id, None, reason))
            else:
                possible.append(_Candidate(prefill, decode, _cost(scoring, prefill, decode)))
        if not possible:
            fits_nobody = bool(candidates) and not any(_holds(need, *each) for each in candidates)
            return NotNow(not own_fault, fits_nobody, tuple(fallen))
        chosen = self._pick(possible)
        verdicts = [
            Verdict(
                "" if each.prefill is None else each.prefill.id,
                each.decode.id,
                each.cost,
                CHOSEN if each is chosen else self._why_rather(chosen, each),
            )
            for each in possible
        ]
        where = chosen.prefill if chosen.prefill is not None else chosen.decode
        num_uncached = need.num_uncached_tokens(where)
        expected = Expected(
            num_queued=where.accounting.num_tokens_before(num_uncached),
            num_running=num_running(chosen.decode),
            num_uncached=num_uncached,
            num_sent=scoring.num_sent(chosen.decode),
        )
        return Placement(chosen.prefill, chosen.decode, chosen.cost, expected, (*verdicts, *fallen))

    def first_token_s(self, need: Need) -> float | None:
        """How long its first token would take if the best candidate took it at once, credit or not.

        None if there is no candidate, or nothing that the estimate could be based on.
        """
        scoring = self._scoring(need)
        topology = self._fleet.topology
        costs = [_cost(scoring, prefill, decode) for prefill, decode in topology.usable_pairs()]
        costs += [scoring.local(decode) for decode in topology.usable_alone()]
        return (
            min((cost.ttft_s for cost in costs), default=None) if all(cost.known for cost in costs) else None
        )

    def _scoring(self, need: Need) -> Scoring:
        now_s = self._clock.now_s()
        self.priors.look(self._fleet.members, now_s)
        return Scoring(need, self.priors, now_s)

    def _why_not(
        self, need: Need, prefill: Member | None, decode: Member, *, pairs_exist: bool
    ) -> tuple[str, bool]:
        """Why this candidate can't be taken, "" if it can; and whether that is for this request only."""
        if need.only is not None and need.only != ("" if prefill is None else prefill.id, decode.id):
            return f"only {need.only[0]} > {need.only[1]} is asked for", True
        for member in (prefill, decode):
            if member is None:
                continue
            if member.refusing:
                return f"{member.id} refused, no load report since", False
            if member.doubted:
                return f"{member.id} was lost by a decode worker, no load report since", False
            if need.max_total_tokens > member.hello.window_tokens:
                return f"{member.id} has a window of {member.hello.window_tokens} tokens", True
        if len(decode.asking) >= MOST_ASKING:
            return f"{len(decode.asking)} wait for a grant of {decode.id}", False
        if prefill is not None:
            return (f"no credit of {prefill.id}", False) if prefill.credit.available <= 0 else ("", False)
        uncached = need.num_uncached_tokens(decode)
        if pairs_exist and 0 < self._remote_prefill_tokens <= uncached:
            return f"{uncached} tokens to prefill: for a prefill worker", True
        return "", False

    def _pick(self, possible: list[_Candidate]) -> _Candidate:
        now_s = self._clock.now_s()
        remote = [each for each in possible if each.prefill is not None]
        local = [each for each in possible if each.prefill is None]
        if remote and local and _least_s(remote) < _least_s(local):
            local = []
        group = local or remote
        best = min(group, key=lambda each: each.cost.score_s)
        group = [each for each in group if _about_as_good(each.cost, best.cost)]
        if not all(each.is_far for each in group):
            group = [each for each in group if not each.is_far]
        recent = [each.recent(now_s) for each in group]
        fewest = min(recent) + 1e-9
        group = [each for each, count in zip(group, recent, strict=True) if count <= fewest]
        return group[int(self._random.random() * len(group))]

    @staticmethod
    def _why_rather(chosen: _Candidate, other: _Candidate) -> str:
        if (chosen.prefill is None) is not (other.prefill is None):
            return (
                "slower than a prefill worker"
                if chosen.prefill is not None
                else "slower than a local prefill"
            )
        if not _about_as_good(other.cost, chosen.cost):
            return "costs more"
        if other.is_far and not chosen.is_far:
            return "about the same, on two hosts"
        return "about the same, another's turn"


def _cost(scoring: Scoring, prefill: Member | None, decode: Member) -> Cost:
    if prefill is None:
        return scoring.local(decode)
    return scoring.pair(prefill, decode, prefill.pairs[decode.id])


def _holds(need: Need, prefill: Member | None, decode: Member) -> bool:
    """Whether the request fits their windows."""
    members = (decode,) if prefill is None else (prefill, decode)
    return all(need.max_total_tokens <= member.hello.window_tokens for member in members)


def _about_as_good(cost: Cost, best: Cost) -> bool:
    """Whether the difference may well be chance."""
    slack_s = ABOUT * best.score_s + ABOUT_S + CHANCE * math.hypot(cost.error_s, best.error_s)
    return cost.score_s <= best.score_s + slack_s


def _least_s(candidates: list[_Candidate]) -> float:
    return min(each.cost.score_s for each in candidates)
