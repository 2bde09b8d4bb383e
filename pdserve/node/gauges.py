"""Copies what a worker's owners count into its Prometheus metrics. Loop only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from prometheus_client import Gauge

from kv_transfer.metrics import DeviceCounts, TransferMetrics
from pdserve.messages import Load
from pdserve.service.metrics import WorkerMetrics
from pdserve.worker.messages import CoreCounts, EngineBeat


class WorkerGauges:
    """One worker's numbers. Totals start over with each role; the counters go on."""

    def __init__(self, metrics: WorkerMetrics) -> None:
        self._metrics = metrics
        self._num_steps = 0
        self._attempts = _States(metrics.attempts)
        self._sequences = _States(metrics.sequences)
        self._leases = _States(metrics.lease_states)

    def on_beat(self, beat: EngineBeat) -> None:
        if beat.num_steps != self._num_steps:
            self._num_steps = beat.num_steps
            self._metrics.steps.set(beat.num_steps)
            self._metrics.step_s.observe(beat.step_s)

    def on_load(self, load: Load) -> None:
        self._metrics.on_load(load)

    def on_wrong_books(self, book: str) -> None:
        self._metrics.books_wrong.inc(book)

    def on_counts(self, counts: CoreCounts, num_failed_matchers: Counter[str]) -> None:
        metrics = self._metrics
        metrics.prefill_tokens.set(counts.num_prefilled_tokens)
        metrics.aborted_prefill_tokens.set(counts.num_aborted_prefill_tokens)
        metrics.decode_tokens.set(counts.num_generated_tokens)
        metrics.preemptions.set(counts.num_preemptions)
        metrics.revocations.set(counts.num_revocations)
        metrics.ignored.set_all(dict(counts.ignored))
        metrics.quarantine_age_s.set(counts.quarantine_age_s)
        self._attempts.show(counts.attempt_states)
        self._sequences.show(counts.sequence_states)
        metrics.failures.set_all(Counter(dict(counts.failures)) + num_failed_matchers)
        metrics.masks.set(counts.num_masks)
        metrics.mask_s.set(counts.mask_s)
        for phase, joules in (("prefill", counts.prefill_energy_j), ("decode", counts.decode_energy_j)):
            if joules is not None:
                metrics.set_energy(joules, phase)

    def on_tick(self, transfer: TransferMetrics, devices: DeviceCounts, num_routers: int) -> None:
        """Once a heartbeat. The transfer owner writes its numbers on another thread; each is read whole."""
        metrics = self._metrics
        metrics.routers.set(num_routers)
        metrics.links.set(transfer.links_up)
        metrics.communicators.set(devices.num_communicators)
        metrics.freed_communicators.set(devices.num_freed_communicators)
        metrics.mapped_pools.set(devices.num_mapped_pools)
        metrics.pending_reads.set(devices.num_pending_reads)
        metrics.staging_bytes.set(devices.staging_bytes)
        metrics.staging_copies.set(devices.num_staging_copies)
        metrics.leases.set(transfer.open_leases)
        self._leases.show(transfer.lease_states)
        metrics.kv_bytes.set(transfer.sent_bytes, "sent")
        metrics.kv_bytes.set(transfer.received_bytes, "received")
        metrics.kv_transfer_s.set(transfer.received_s)
        metrics.links_lost.set(transfer.links_lost)
        metrics.links_pushed_out.set(transfer.pushed_out)
        metrics.handed_off.set(transfer.confirmed_leases, "confirmed")
        metrics.handed_off.set(transfer.handed_off_leases, "received")
        metrics.handed_off.set(transfer.failed_leases, "failed")
        metrics.handed_off.set(transfer.aborted_leases, "aborted")
        metrics.stale.set_all(dict(transfer.stale))
        metrics.corrupt.set_all(dict(transfer.corrupt))
        metrics.fell_back.set_all(dict(transfer.fell_back))
        metrics.malformed.set_all(dict(transfer.malformed))
        metrics.unproven.set_all(dict(transfer.unproven))
        metrics.set_unknown_frames(dict(transfer.unknown))


class _States:
    """A gauge with a label for each state; those of an earlier role go to 0."""

    def __init__(self, gauge: Gauge) -> None:
        self._gauge = gauge
        self._known: dict[str, None] = {}

    def show(self, states: Iterable[tuple[str, int]]) -> None:
        now = dict(states)
        self._known |= dict.fromkeys(now)
        for state in self._known:
            self._gauge.labels(state).set(now.get(state, 0))
