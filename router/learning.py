"""What a settled attempt teaches: how long things took, and whose prefix cache holds what."""

from __future__ import annotations

from pdserve.clock import Clock
from router.attempt import Attempt
from router.attempt_need import Need
from router.member import Member
from router.metrics import RouterMetrics
from router.placement import Placement
from router.scoring import CostParameters, busy_prior, handover_prior, prefill_prior


class Learner:
    """Event-loop thread only."""

    def __init__(self, parameters: CostParameters, clock: Clock, metrics: RouterMetrics) -> None:
        self._parameters = parameters
        self._clock = clock
        self._metrics = metrics

    def settled(self, attempt: Attempt, placement: Placement, need: Need) -> None:
        """The sequence runs, or the attempt has ended before that."""
        if placement.prefill is None:
            self._local(attempt, placement, need)
        else:
            self._remote(attempt, placement.prefill, placement, need)
        seen_s = attempt.times.first_seen_s
        if seen_s is not None and placement.cost.known:
            took_s = seen_s - attempt.times.credit_held_s
            self._metrics.estimate_error_s.observe(abs(took_s - placement.cost.ttft_s))

    def _remote(self, attempt: Attempt, prefill: Member, placement: Placement, need: Need) -> None:
        times, expected, decode = attempt.times, placement.expected, placement.decode
        now_s, prior, fits = self._clock.now_s(), prefill_prior(prefill, self._parameters), prefill.fits
        first, started = times.first_token, times.started
        if first is not None:
            fits.queue.observe(expected.num_queued, first.queue_s, prior, now_s)
            computed = max(1, need.num_tokens - first.num_cached_tokens)
            fits.prefill.observe(computed, first.prefill_s, prior, now_s)
            if times.trip_s is not None:
                fits.trip.observe(0, times.trip_s, self._parameters.trip, now_s)
        record = prefill.pairs.get(decode.id)
        if started is not None and record is not None and record.decode == decode.ref:
            took_s = started.transfer_exposed_s + started.commit_s
            way = handover_prior(prefill, decode, self._parameters)
            record.handover.observe(expected.num_sent, took_s, way, now_s)
        if first is not None or started is not None:
            self._holds(prefill, need)
        if started is not None:
            self._holds(decode, need)

    def _local(self, attempt: Attempt, placement: Placement, need: Need) -> None:
        started, expected, decode = attempt.times.started, placement.expected, placement.decode
        if started is None:
            return
        now_s, prior, fits = self._clock.now_s(), prefill_prior(decode, self._parameters), decode.fits
        fits.queue.observe(expected.num_queued, started.queue_s, prior, now_s)
        computed = max(1, need.num_tokens - started.num_cached_tokens)
        if expected.num_running:
            busy = busy_prior(prior, self._parameters)
            fits.prefill_busy.observe(computed, started.prefill_s, busy, now_s)
        else:
            fits.prefill.observe(computed, started.prefill_s, prior, now_s)
        self._holds(decode, need)

    @staticmethod
    def _holds(member: Member, need: Need) -> None:
        if not member.cache.is_told:
            member.cache.sent(need.hashes(member))
