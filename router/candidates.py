"""Which pairs and workers a placement weighs: all of them, or in a large cluster a sample of those that can be taken.

Weighing one takes some ten microseconds of the router's only thread, and pairs grow with the product of the workers.
Beyond MOST_PAIRS a few prefill workers are drawn and a few of each one's decode workers: the best of a few drawn ones
is nearly as good as the best of all (Mitzenmacher 2001, "The power of two choices"). Workers that hold the prompt's
beginning are not left to chance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pdserve.ids import Random
from router.attempt_need import Need
from router.explain import Verdict
from router.member import Member
from router.topology import Topology

MOST_PAIRS = 64
# Requests that a decode worker is asked to grant at a time, so that it always has the next one. More would only stand
# in its list instead of the router's queue, or be refused and asked again.
MOST_ASKING = 32
_NUM_DRAWN = 2  # workers of a role by draw …
_NUM_HOLDING = 3  # … and those that hold most of the prompt

Candidate = tuple[Member | None, Member]
"""A pair, or (None, a decode worker alone)."""


@dataclass(frozen=True, slots=True)
class Looked:
    """What there is for one attempt.

    possible     can be taken now
    fallen       can't, and why
    own_fault    one of these fell for what the request is or asks for
    fits_nobody  there are candidates, and the windows of all are too small
    """

    possible: list[Candidate]
    fallen: list[Verdict]
    own_fault: bool
    fits_nobody: bool


class CandidateFinder:
    """Event-loop thread only. remote_prefill_tokens: see placement.py."""

    def __init__(self, topology: Topology, random: Random, remote_prefill_tokens: int) -> None:
        self._topology = topology
        self._random = random
        self._remote_prefill_tokens = remote_prefill_tokens

    def look(self, need: Need) -> Looked:
        """What can be taken for this attempt, and why the rest can't."""
        topology = self._topology
        if need.only is None and topology.num_links > MOST_PAIRS:
            return self._look_at_some(need)
        pairs: list[Candidate] = [*topology.usable_pairs()]
        return self._sift(need, [*pairs, *((None, each) for each in topology.usable_alone())], bool(pairs))

    def all(self) -> list[Candidate]:
        """Whether they can be taken now or not; of a large cluster a sample."""
        topology = self._topology
        if topology.num_links > MOST_PAIRS:
            prefills = self._draw(topology.usable_prefills(), _NUM_DRAWN + _NUM_HOLDING)
            pairs = [
                (prefill, decode)
                for prefill in prefills
                for decode in self._draw(topology.linked(prefill), _NUM_DRAWN + _NUM_HOLDING)
            ]
            alone = self._draw(topology.usable_alone(), MOST_PAIRS)
        else:
            pairs, alone = topology.usable_pairs(), topology.usable_alone()
        return [*pairs, *((None, each) for each in alone)]

    def _look_at_some(self, need: Need) -> Looked:
        """Sift the workers, which are few, and draw pairs among those that are left."""
        topology = self._topology
        prefills, decodes = topology.usable_prefills(), topology.usable_decodes()
        reasons = {each: _why_not_worker(need, each) for each in (*prefills, *decodes)}
        able = {each: _depth(need, each) for each, (reason, _) in reasons.items() if not reason}
        able_prefills = [each for each in prefills if each in able]
        chosen = self._chosen(need, able_prefills, able)
        pairs: list[Candidate] = []
        for number, prefill in enumerate(dict.fromkeys((*chosen, *able_prefills))):
            if pairs and number >= len(chosen):
                break  # the others only matter where those chosen are linked with nobody who can take it
            linked = [each for each in topology.linked(prefill) if each in able]
            pairs += [(prefill, decode) for decode in self._chosen(need, linked, able)]
        alone = topology.usable_alone()
        able_alone = self._chosen(need, [each for each in alone if each in able], able)
        some = [*pairs, *((None, each) for each in able_alone)]
        pairs_exist = any(map(topology.linked, prefills))  # now or later: as where all are looked at
        looked = self._sift(need, some, pairs_exist)
        if looked.possible:
            return looked
        fallen = [
            Verdict(each.id if each.prefills else "", "" if each.prefills else each.id, None, reason)
            for each, (reason, _) in reasons.items()
            if reason
        ]
        own_fault = looked.own_fault or any(own for _, own in reasons.values())
        fits = any(_fits(need, each) for each in alone) or any(
            _fits(need, prefill) and any(_fits(need, each) for each in topology.linked(prefill))
            for prefill in prefills
        )
        fits_nobody = not fits and (pairs_exist or bool(alone))
        return Looked([], [*looked.fallen, *fallen[:MOST_PAIRS]], own_fault, fits_nobody)

    def _sift(self, need: Need, candidates: Sequence[Candidate], pairs_exist: bool) -> Looked:
        possible: list[Candidate] = []
        fallen: list[Verdict] = []
        own_fault = False
        for prefill, decode in candidates:
            reason, own = self._why_not(need, prefill, decode, pairs_exist=pairs_exist)
            if reason:
                own_fault = own_fault or own
                fallen.append(Verdict("" if prefill is None else prefill.id, decode.id, None, reason))
            else:
                possible.append((prefill, decode))
        if possible:
            return Looked(possible, fallen, own_fault, False)
        fits_nobody = bool(candidates) and not any(
            all(_fits(need, member) for member in pair if member is not None) for pair in candidates
        )
        return Looked(possible, fallen, own_fault, fits_nobody)

    def _why_not(
        self, need: Need, prefill: Member | None, decode: Member, *, pairs_exist: bool
    ) -> tuple[str, bool]:
        """Why this candidate can't be taken, "" if it can; and whether that is for this request only."""
        if need.only is not None and need.only != ("" if prefill is None else prefill.id, decode.id):
            return f"only {need.only[0]} > {need.only[1]} is asked for", True
        for member in (prefill, decode):
            if member is not None and (found := _unfit(need, member))[0]:
                return found
        if reason := _not_now(decode) or ("" if prefill is None else _not_now(prefill)):
            return reason, False
        if prefill is not None:
            return "", False
        uncached = need.num_uncached_tokens(decode)
        if pairs_exist and 0 < self._remote_prefill_tokens <= uncached:
            return f"{uncached} tokens to prefill: for a prefill worker", True
        return "", False

    def _chosen(self, need: Need, members: list[Member], depths: Mapping[Member, int]) -> list[Member]:
        """Some of them: where the request should go rather, those that hold most of it, and a few by draw."""
        if len(members) <= _NUM_HOLDING + _NUM_DRAWN:
            return members
        wanted = () if need.prefer is None else need.prefer
        kept = need.kept_on[0].id if need.kept_on is not None else None
        holding = sorted((each for each in members if depths[each]), key=lambda each: -depths[each])
        chosen = dict.fromkeys(holding[:_NUM_HOLDING])
        chosen |= dict.fromkeys(each for each in members if each.id in wanted or each.id == kept)
        return [*chosen, *self._draw([each for each in members if each not in chosen], _NUM_DRAWN)]

    def _draw(self, members: Sequence[Member], num: int) -> list[Member]:
        """That many different ones."""
        left = list(members)
        for place in range(min(num, len(left))):
            other = place + int(self._random.random() * (len(left) - place))
            left[place], left[other] = left[other], left[place]
        return left[:num]


def _depth(need: Need, member: Member) -> int:
    """About how many blocks of the prompt a worker holds, by four looks: its hits would be counted block by block."""
    if not len(member.cache):
        return 0
    hashes = need.hashes(member)
    last = len(hashes) - 1
    for place in dict.fromkeys((last, last // 2, last // 4, 0)):
        if place >= 0 and member.cache.holds(hashes[place]):
            return place + 1
    return 0


def _why_not_worker(need: Need, member: Member) -> tuple[str, bool]:
    found = _unfit(need, member)
    return found if found[0] else (_not_now(member), False)


def _unfit(need: Need, member: Member) -> tuple[str, bool]:
    if member.refusing:
        return f"{member.id} refused, no load report since", False
    if member.doubted:
        return f"{member.id} was lost by a decode worker, no load report since", False
    if not _fits(need, member):
        return f"{member.id} has a window of {member.hello.window_tokens} tokens", True
    return "", False


def _not_now(member: Member) -> str:
    if member.decodes:
        too_many = len(member.asking) >= MOST_ASKING
        return f"{len(member.asking)} wait for a grant of {member.id}" if too_many else ""
    return f"no credit of {member.id}" if member.credit.available <= 0 else ""


def _fits(need: Need, member: Member) -> bool:
    return need.max_total_tokens <= member.hello.window_tokens
