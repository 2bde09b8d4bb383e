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
from router.candidates import CandidateFinder
from router.explain import CHOSEN, Verdict
from router.member import Member
from router.priors import CostParameters, Priors
from router.scoring import Cost, Scoring, num_running
from router.topology import Topology

ABOUT = 0.1  # of the best score: estimates aren't better than that …
ABOUT_S = 0.0005  # … nor than that …
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
        topology: Topology,
        clock: Clock,
        random: Random,
        *,
        remote_prefill_tokens: int = 0,
        parameters: CostParameters | None = None,
    ) -> None:
        self._topology = topology
        self._clock = clock
        self._random = random
        self._finder = CandidateFinder(topology, random, remote_prefill_tokens)
        self.priors = Priors(parameters if parameters is not None else CostParameters())

    def place(self, need: Need) -> Placement | NotNow:
        """Choose for one attempt; books nothing."""
        scoring = self._scoring(need)
        looked = self._finder.look(need)
        if not looked.possible:
            return NotNow(not looked.own_fault, looked.fits_nobody, tuple(looked.fallen))
        possible = [_Candidate(*each, _cost(scoring, *each)) for each in looked.possible]
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
        return Placement(chosen.prefill, chosen.decode, chosen.cost, expected, (*verdicts, *looked.fallen))

    def first_token_s(self, need: Need) -> float | None:
        """How long its first token would take if the best candidate took it at once, credit or not.

        None if there is no candidate, or nothing that the estimate could be based on.
        """
        scoring = self._scoring(need)
        costs = [_cost(scoring, *each) for each in self._finder.all()]
        return (
            min((cost.ttft_s for cost in costs), default=None) if all(cost.known for cost in costs) else None
        )

    def _scoring(self, need: Need) -> Scoring:
        now_s = self._clock.now_s()
        self.priors.look(self._topology.members, now_s)
        return Scoring(need, self.priors, now_s)

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


def _about_as_good(cost: Cost, best: Cost) -> bool:
    """Whether the difference may well be chance."""
    slack_s = ABOUT * best.score_s + ABOUT_S + CHANCE * math.hypot(cost.error_s, best.error_s)
    return cost.score_s <= best.score_s + slack_s


def _least_s(candidates: list[_Candidate]) -> float:
    return min(each.cost.score_s for each in candidates)
