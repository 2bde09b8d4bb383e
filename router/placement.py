"""Where an attempt goes: filter, score, pick, over pairs that are up and workers that may prefill for themselves.

The score is an estimate in seconds of what the choice costs until the first token, plus a share for the load that
it adds; the lowest wins, equal ones by a draw. Why each candidate fell or won is kept as `Verdict`s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pdserve.blockhash import hash_blocks
from pdserve.clock import Clock
from pdserve.ids import Random, WorkerRef
from router.fleet import Fleet
from router.identity import ModelIdentity
from router.member import Member


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """What the estimate is made of, where workers' reports don't say it."""

    prefill_tokens_per_s: float = 2_000.0  # before a worker has told its own
    transfer_s_per_token: float = 1e-5
    other_host: float = 2.0  # transfer costs so many times more
    step_s: float = 0.02
    sequence: float = 0.1  # of a step, for each sequence on a decode worker
    no_room_s: float = 1.0  # for blocks that aren't free now
    used_pool_s: float = 0.01  # for a pool that is all in use
    avoid_s: float = 10.0  # for a pair on which this request failed before
    recent_s: float = 1e-4  # for each recent assignment: spreads what comes one at a time
    local_disturbs: float = 0.5  # of a local prefill, for each running sequence that it delays


@dataclass(slots=True, kw_only=True, eq=False)
class Need:
    """What one attempt asks for.

    identity    the model that the ids are of
    num_tokens  ids of the attempt; max_total_tokens: prompt + max_tokens, what the window must hold
    avoid       (prefill id or "", decode id) -> how often this request failed there
    prefer      such a pair that is taken if it is possible at all (later choices of one request)
    kept_on     a prefill worker that may still hold the blocks of an earlier attempt, and how many tokens of them
    """

    identity: ModelIdentity
    token_ids: Sequence[int]
    max_total_tokens: int
    cache_salt: str = ""
    avoid: dict[tuple[str, str], int] = field(default_factory=dict)
    prefer: tuple[str, str] | None = None
    kept_on: tuple[WorkerRef, int] | None = None
    _hashes: dict[tuple[bytes, int], list[bytes]] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def num_cached_tokens(self, member: Member) -> int:
        """Leading tokens that this worker holds as far as is known; the last one is always computed."""
        hello = member.hello
        if not len(member.cache):
            return 0
        key = (hello.cache_seed, hello.block_size)
        hashes = self._hashes.get(key)
        if hashes is None:
            hashes = hash_blocks(
                self.token_ids, hello.block_size, seed=hello.cache_seed, salt=self.cache_salt
            )
            self._hashes[key] = hashes
        most = (self.num_tokens - 1) // hello.block_size
        return min(member.cache.num_hits(hashes), most) * hello.block_size


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one candidate: a score in seconds, or why it could not be taken."""

    prefill: str
    decode: str
    score_s: float | None
    reason: str

    def __str__(self) -> str:
        pair = f"{self.prefill}>{self.decode}" if self.prefill else self.decode
        return (
            f"{pair} {self.reason}"
            if self.score_s is None
            else f"{pair} {self.score_s * 1e3:.2f} ms {self.reason}"
        )


@dataclass(frozen=True, slots=True)
class Placement:
    """A pair, or (prefill None) a decode worker alone; num_uncached_tokens: what is to be prefilled there."""

    prefill: Member | None
    decode: Member
    num_uncached_tokens: int
    explain: tuple[Verdict, ...]


@dataclass(frozen=True, slots=True)
class NotNow:
    """No candidate; `for_all`: nothing about this request is to blame, others would fare no better."""

    for_all: bool
    explain: tuple[Verdict, ...]


class Placer:
    """Event-loop thread only."""

    def __init__(self, fleet: Fleet, clock: Clock, random: Random, weights: Weights | None = None) -> None:
        self._fleet = fleet
        self._clock = clock
        self._random = random
        self._weights = weights if weights is not None else Weights()

    def place(self, need: Need) -> Placement | NotNow:
        """Choose for one attempt; books nothing."""
        candidates: list[tuple[Member | None, Member]] = list(self._fleet.usable_pairs())
        candidates += [(None, member) for member in self._fleet.usable_alone()]
        prefill_s = _remembering(lambda member: self._prefill_cost_s(need, member))
        decode_s = _remembering(lambda member: self._decode_cost_s(need, member))
        verdicts: list[Verdict] = []
        best: list[tuple[Member | None, Member]] = []
        best_s = 0.0
        own_fault = False
        for prefill, decode in candidates:
            prefill_id = prefill.id if prefill is not None else ""
            reason, own = self._why_not(need, prefill, decode)
            if reason:
                own_fault = own_fault or own
                verdicts.append(Verdict(prefill_id, decode.id, None, reason))
                continue
            score_s = self._pair_cost_s(need, prefill, decode) + decode_s(decode)
            score_s += prefill_s(prefill) if prefill is not None else self._local_cost_s(need, decode)
            verdicts.append(Verdict(prefill_id, decode.id, score_s, ""))
            if not best or score_s < best_s - 1e-9:
                best, best_s = [(prefill, decode)], score_s
            elif score_s <= best_s + 1e-9:
                best.append((prefill, decode))
        if not best:
            return NotNow(not own_fault, tuple(verdicts))
        prefill, decode = best[int(self._random.random() * len(best))]
        where = prefill if prefill is not None else decode
        return Placement(prefill, decode, self._num_uncached(need, where), tuple(verdicts))

    def _why_not(self, need: Need, prefill: Member | None, decode: Member) -> tuple[str, bool]:
        """Why this candidate can't be taken, "" if it can; and whether that is for this request only."""
        for member in (prefill, decode):
            if member is None:
                continue
            if member.refusing:
                return f"{member.id} refused, no load report since", False
            if member.doubted:
                return f"{member.id} was lost by a decode worker, no load report since", False
            if need.max_total_tokens > member.hello.window_tokens:
                return f"{member.id} has a window of {member.hello.window_tokens} tokens", True
        if prefill is not None and prefill.credit.available <= 0:
            return f"no credit of {prefill.id}", False
        return "", False

    @staticmethod
    def _num_uncached(need: Need, member: Member) -> int:
        cached = need.num_cached_tokens(member)
        if need.kept_on is not None and need.kept_on[0] == member.ref:
            cached = max(cached, need.kept_on[1])
        return need.num_tokens - min(cached, need.num_tokens - 1)

    def _prefill_cost_s(self, need: Need, member: Member) -> float:
        """Queue, and computing what isn't cached."""
        todo = member.accounting.num_queued_tokens + self._num_uncached(need, member)
        return todo / self._rate(member) + self._recent_s(member)

    def _local_cost_s(self, need: Need, member: Member) -> float:
        """The same on a worker that prefills for itself, and the delay of what runs there."""
        todo = member.accounting.num_queued_tokens + self._num_uncached(need, member)
        running = 0 if member.accounting.load is None else member.accounting.load.num_running
        return todo / self._rate(member) * (1.0 + self._weights.local_disturbs * running)

    def _decode_cost_s(self, need: Need, member: Member) -> float:
        """Sequences it runs, and whether it has the blocks."""
        weights, accounting = self._weights, member.accounting
        load = accounting.load
        step_s = load.step_s if load is not None and load.step_s > 0 else weights.step_s
        cost_s = step_s * weights.sequence * accounting.num_sequences + self._recent_s(member)
        free = accounting.num_free_blocks(member.hello.num_blocks)
        if free < need.num_tokens // member.hello.block_size + 1:
            cost_s += weights.no_room_s * (1 + (load.num_waiting if load is not None else 0))
        return cost_s + weights.used_pool_s * (1.0 - free / member.hello.num_blocks)

    def _pair_cost_s(self, need: Need, prefill: Member | None, decode: Member) -> float:
        """Moving the KV, and what this request has seen of the pair."""
        pair = (prefill.id if prefill is not None else "", decode.id)
        cost_s = self._weights.avoid_s * need.avoid.get(pair, 0)
        if need.prefer is not None and need.prefer != pair:
            cost_s += self._weights.avoid_s
        if prefill is not None:
            far = prefill.hello.host_id != decode.hello.host_id
            per_token_s = self._weights.transfer_s_per_token * (self._weights.other_host if far else 1.0)
            cost_s += (need.num_tokens - need.num_cached_tokens(decode)) * per_token_s
        return cost_s

    def _rate(self, member: Member) -> float:
        load = member.accounting.load
        told = load.prefill_tokens_per_s if load is not None else 0.0
        return told if told > 0 else self._weights.prefill_tokens_per_s

    def _recent_s(self, member: Member) -> float:
        return self._weights.recent_s * member.accounting.recent(self._clock.now_s())


def _remembering(cost_s: Callable[[Member], float]) -> Callable[[Member], float]:
    known: dict[Member, float] = {}

    def look_up(member: Member) -> float:
        if member not in known:
            known[member] = cost_s(member)
        return known[member]

    return look_up
