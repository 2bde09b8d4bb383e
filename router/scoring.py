"""What a candidate costs, in seconds, part by part: the wait for the first token, and the load that it adds.

Estimates begin at what a worker reports of itself and follow what this router observes (fits.py).
"""

from __future__ import annotations

import math
from typing import NamedTuple

from router.attempt_need import Need
from router.member import Member, PairRecord
from router.priors import Priors, told_rate


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

    def __init__(self, need: Need, priors: Priors, now_s: float) -> None:
        self._need = need
        self._priors = priors
        self._parameters = priors.parameters
        self._now_s = now_s
        self._computing: dict[Member, tuple[float, float, float, float]] = {}
        self._decoding: dict[Member, float] = {}
        self._sent: dict[Member, int] = {}

    def pair(self, prefill: Member, decode: Member, record: PairRecord) -> Cost:
        """Queue and prefill there, the way between, the decode worker's load."""
        queue_s, prefill_s, trip_s, error_s = self._remote_prefill(prefill)
        decode_s, history_s = self._decode(decode), self._history(prefill.id, decode.id)
        way = self._priors.handover(prefill, decode, self._now_s)
        handover_s = record.handover.predict(self.num_sent(decode), way, self._now_s)
        parts = (
            ("queue", queue_s),
            ("prefill", prefill_s),
            ("trip", trip_s),
            ("transfer", handover_s),
            ("decode", decode_s),
            ("history", history_s),
        )
        ttft_s = queue_s + prefill_s + trip_s + handover_s
        error_s = math.hypot(error_s, record.handover.doubt_s(way, self._now_s))
        return Cost(parts, ttft_s + decode_s + history_s, ttft_s, self._is_known(prefill), error_s)

    def local(self, decode: Member) -> Cost:
        """Queue and prefill on the decode worker itself, and the delay that this causes to what runs there."""
        todo = self._need.num_uncached_tokens(decode)
        queued = decode.accounting.num_tokens_before(todo)
        fits, now_s = decode.fits, self._now_s
        queue, prefill = self._priors.queue(decode, now_s), self._priors.prefill(decode, now_s)
        running = num_running(decode)
        queue_s = fits.queue.predict(queued, queue, now_s)
        alone_s = prefill_s = fits.prefill.predict(todo, prefill, now_s)
        error_s = fits.prefill.doubt_s(prefill, now_s)
        if running:
            busy = self._priors.busy(decode, now_s)
            prefill_s = fits.prefill_busy.predict(todo, busy, now_s)
            error_s = fits.prefill_busy.doubt_s(busy, now_s)
        # Each running stream stands still for as long as the engine computes the prompt.
        disturbs_s = (running + decode.accounting.num_assigned) * alone_s
        decode_s, history_s = self._decode(decode), self._history("", decode.id)
        parts = (
            ("queue", queue_s),
            ("prefill", prefill_s),
            ("disturbs", disturbs_s),
            ("decode", decode_s),
            ("history", history_s),
        )
        ttft_s = queue_s + prefill_s
        error_s = math.hypot(fits.queue.doubt_s(queue, now_s), error_s)
        score_s = ttft_s + disturbs_s + decode_s + history_s
        return Cost(parts, score_s, ttft_s, self._is_known(decode), error_s)

    def num_sent(self, decode: Member) -> int:
        """Tokens whose KV would be sent to it."""
        if decode not in self._sent:
            self._sent[decode] = self._need.num_tokens - self._need.num_cached_tokens(decode)
        return self._sent[decode]

    def _remote_prefill(self, member: Member) -> tuple[float, float, float, float]:
        """Queue, prefill and trip, and how far they may be off."""
        if member not in self._computing:
            fits, now_s = member.fits, self._now_s
            queue, prefill = self._priors.queue(member, now_s), self._priors.prefill(member, now_s)
            trip = self._priors.trip(member, now_s)
            todo = self._need.num_uncached_tokens(member)
            self._computing[member] = (
                fits.queue.predict(member.accounting.num_tokens_before(todo), queue, now_s),
                fits.prefill.predict(todo, prefill, now_s),
                fits.trip.predict(0, trip, now_s),
                math.hypot(
                    fits.queue.doubt_s(queue, now_s),
                    fits.prefill.doubt_s(prefill, now_s),
                    fits.trip.doubt_s(trip, now_s),
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
        cost_s = self._priors.step_s(member) * parameters.sequence * accounting.num_sequences
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
        return member.fits.prefill.known(self._now_s) or told_rate(member, self._now_s) > 0


def num_running(member: Member) -> int:
    """Streams that a prefill beside them would delay."""
    return 0 if member.accounting.load is None else member.accounting.load.num_running
