"""What a settled attempt teaches: how long things took, and whose prefix cache holds what."""

from __future__ import annotations

from pdserve.clock import Clock
from router.attempt_need import Need
from router.member import Member
from router.metrics import RouterMetrics
from router.placement import Placement
from router.priors import Priors
from router.timings import AttemptTimes


class Learner:
    """Event-loop thread only."""

    def __init__(self, priors: Priors, clock: Clock, metrics: RouterMetrics) -> None:
        self._priors = priors
        self._clock = clock
        self._metrics = metrics

    def settled(self, times: AttemptTimes, placement: Placement, need: Need) -> None:
        """The sequence runs, or the attempt has ended before that."""
        prefill, decode, expected = placement.prefill, placement.decode, placement.expected
        now_s, priors, started = self._clock.now_s(), self._priors, times.started
        where = decode if prefill is None else prefill
        fits = where.fits
        told = started if prefill is None else times.first_token  # by who computed the prompt
        if told is not None:
            fits.queue.observe(expected.num_queued, told.queue_s, priors.queue(where, now_s), now_s)
            line, prior = fits.prefill, priors.prefill(where, now_s)
            if prefill is None and expected.num_running:
                line, prior = fits.prefill_busy, priors.busy(where, now_s)
            line.observe(max(1, need.num_tokens - told.num_cached_tokens), told.prefill_s, prior, now_s)
        if times.trip_s is not None:
            fits.trip.observe(0, times.trip_s, priors.trip(where, now_s), now_s)
        record = None if prefill is None else prefill.pairs.get(decode.id)
        if prefill is not None and started is not None and record is not None and record.decode == decode.ref:
            took_s = started.transfer_exposed_s + started.commit_s
            way = priors.handover(prefill, decode, now_s)
            record.handover.observe(expected.num_sent, took_s, way, now_s)
        if told is not None or started is not None:
            self._holds(where, need)
        if started is not None:
            self._holds(decode, need)
        if times.first_seen_s is not None and placement.cost.known:
            took_s = times.first_seen_s - times.credit_held_s
            self._metrics.estimate_error_s.observe(abs(took_s - placement.cost.ttft_s))

    @staticmethod
    def _holds(member: Member, need: Need) -> None:
        if not member.cache.is_told:
            member.cache.sent(need.hashes(member))
