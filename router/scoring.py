"""What a candidate costs, in seconds, part by part: the wait for the first token, and the load that it adds.

Estimates begin at what a worker reports of itself and follow what this router observes (fits.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from router.attempt_need import Need
from router.fitted_lines import Prior
from router.member import Member, PairRecord

TRIP = Prior(0.001)
HANDOVER = Prior(0.002, 1e-5)
STALE_RATE_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CostParameters:
    """What estimates begin at, and what can't be observed."""

    prefill_tokens_per_s: float = 2_000.0  # before a worker has told its own
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


class Cost(NamedTuple):  # not a dataclass: one is made for each pair at each placement
    """Seconds by part.

    score_s  their sum
    ttft_s   until the first token, of the parts that a client waits for
    known    it comes from reports or observations of late, not from guesses alone
    error_s  how far the observed parts may well be off by chance
    """

    parts: tuple[tuple[str, float], ...]
    score_s: float
    ttft_s: float
    known: bool
    error_s: float


class Scoring:
    """All costs of one attempt at one moment; what belongs to a worker alone is computed once."""

    def __init__(self, need: Need, parameters: CostParameters, now_s: float) -> None:
        self._need = need
        self._parameters = parameters
        self._now_s = now_s
        self._computing: dict[Member, tuple[float, float, float, float]] = {}
        self._decoding: dict[Member, float] = {}

    def pair(self, prefill: Member, decode: Member, record: PairRecord) -> Cost:
        """Queue and prefill there, the way between, the decode worker's load."""
        queue_s, prefill_s, trip_s, error_s = self._remote_prefill(prefill)
        decode_s, history_s = self._decode(decode), self._history(prefill.id, decode.id)
        handover_s = record.handover.predict(
            self.num_sent(decode), self.handover_prior(prefill, decode), self._now_s
        )
        parts = (
            ("queue", queue_s),
            ("prefill", prefill_s),
            ("trip", trip_s),
            ("transfer", handover_s),
            ("decode", decode_s),
            ("history", history_s),
        )
        ttft_s = queue_s + prefill_s + trip_s + handover_s
        error_s = math.hypot(
            error_s, record.handover.doubt_s(self.handover_prior(prefill, decode), self._now_s)
        )
        return Cost(parts, ttft_s + decode_s + history_s, ttft_s, self._is_known(prefill), error_s)

    def local(self, decode: Member) -> Cost:
        """Queue and prefill on the decode worker itself, and the delay that this causes to what runs there."""
        todo = self._need.num_uncached_tokens(decode)
        queued = decode.accounting.num_tokens_before(todo)
        prior = self.prefill_prior(decode)
        running = num_running(decode)
        queue_s = decode.fits.queue.predict(queued, prior, self._now_s)
        prefill_s = local_prefill_s(decode, todo, prior, self._parameters, self._now_s)
        # Each running stream stands still for as long as the engine computes the prompt.
        disturbs_s = running * decode.fits.prefill.predict(todo, prior, self._now_s)
        decode_s, history_s = self._decode(decode), self._history("", decode.id)
        parts = (
            ("queue", queue_s),
            ("prefill", prefill_s),
            ("disturbs", disturbs_s),
            ("decode", decode_s),
            ("history", history_s),
        )
        ttft_s = queue_s + prefill_s
        prefill = decode.fits.prefill_busy if running else decode.fits.prefill
        error_s = math.hypot(
            decode.fits.queue.doubt_s(prior, self._now_s), prefill.doubt_s(prior, self._now_s)
        )
        score_s = ttft_s + disturbs_s + decode_s + history_s
        return Cost(parts, score_s, ttft_s, self._is_known(decode), error_s)

    def num_sent(self, decode: Member) -> int:
        """Tokens whose KV would be sent to it."""
        return self._need.num_tokens - self._need.num_cached_tokens(decode)

    def prefill_prior(self, member: Member) -> Prior:
        """By its own report."""
        return prefill_prior(member, self._parameters)

    def handover_prior(self, prefill: Member, decode: Member) -> Prior:
        """By the hosts that the two are on."""
        return handover_prior(prefill, decode, self._parameters)

    def _remote_prefill(self, member: Member) -> tuple[float, float, float, float]:
        """Queue, prefill and trip, and how far they may be off."""
        if member not in self._computing:
            prior, fits = self.prefill_prior(member), member.fits
            todo = self._need.num_uncached_tokens(member)
            self._computing[member] = (
                fits.queue.predict(member.accounting.num_tokens_before(todo), prior, self._now_s),
                fits.prefill.predict(todo, prior, self._now_s),
                fits.trip.predict(0, self._parameters.trip, self._now_s),
                math.hypot(
                    fits.queue.doubt_s(prior, self._now_s),
                    fits.prefill.doubt_s(prior, self._now_s),
                    fits.trip.doubt_s(self._parameters.trip, self._now_s),
                ),
            )
        return self._computing[member]

    def _decode(self, member: Member) -> float:
        """Sequences it runs, and whether it has the blocks."""
        if member not in self._decoding:
            self._decoding[member] = self._decode_s(member)
        return self._decoding[member]

    def _decode_s(self, member: Member) -> float:
        parameters, accounting = self._parameters, member.accounting
        load = accounting.load
        step_s = load.step_s if load is not None and load.step_s > 0 else parameters.step_s
        cost_s = step_s * parameters.sequence * accounting.num_sequences
        free = accounting.num_free_blocks(member.hello.num_blocks)
        if free < self._need.num_tokens // member.hello.block_size + 1:
            cost_s += parameters.no_room_s * (1 + (load.num_waiting if load is not None else 0))
        return cost_s + parameters.used_pool_s * (1.0 - free / member.hello.num_blocks)

    def _history(self, prefill_id: str, decode_id: str) -> float:
        """What this request has seen of the pair."""
        need, pair = self._need, (prefill_id, decode_id)
        cost_s = self._parameters.avoid_s * need.avoid.get(pair, 0)
        if need.prefer is not None and need.prefer != pair:
            cost_s += self._parameters.avoid_s
        return cost_s

    def _is_known(self, member: Member) -> bool:
        """A rate reported long ago by a worker that has been idle since is ignored: if it is wrong,
        and requests are refused by it, nothing will ever put it right."""
        accounting = member.accounting
        load = accounting.load
        if member.fits.prefill.known(self._now_s):
            return True
        if load is None or load.prefill_tokens_per_s <= 0:
            return False
        is_new = self._now_s - accounting.rate_told_s <= STALE_RATE_S
        return is_new or accounting.num_queued_tokens > 0


def num_running(member: Member) -> int:
    """Streams that a prefill beside them would delay."""
    return 0 if member.accounting.load is None else member.accounting.load.num_running


def prefill_prior(member: Member, parameters: CostParameters) -> Prior:
    """What prefill, and waiting for others' prefill, takes by the worker's own report."""
    load = member.accounting.load
    told = load.prefill_tokens_per_s if load is not None else 0.0
    return Prior(0.0, 1.0 / (told if told > 0 else parameters.prefill_tokens_per_s))


def busy_prior(prior: Prior, parameters: CostParameters) -> Prior:
    """The same beside running streams."""
    return Prior(prior.base_s, prior.slope_s * parameters.busy_slowdown)


def handover_prior(prefill: Member, decode: Member, parameters: CostParameters) -> Prior:
    """What moving the KV takes beyond the prefill that it overlaps with."""
    far = prefill.hello.host_id != decode.hello.host_id
    return Prior(
        parameters.handover.base_s, parameters.handover.slope_s * (parameters.other_host if far else 1.0)
    )


def local_prefill_s(
    member: Member, num_tokens: int, prior: Prior, parameters: CostParameters, now_s: float
) -> float:
    """First chunk to first token on a worker that prefills for itself."""
    if num_running(member):
        return member.fits.prefill_busy.predict(num_tokens, busy_prior(prior, parameters), now_s)
    return member.fits.prefill.predict(num_tokens, prior, now_s)
