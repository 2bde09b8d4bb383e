"""What a worker exports to Prometheus. Seconds and bytes; no request ids as labels."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from pdserve.messages import Load

_STEP_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
_STATES = ("free", "granted", "owned", "cached", "quarantined")


class Total:
    """A counter fed from a running total that another owner keeps: `set` adds what has come since."""

    def __init__(
        self, registry: CollectorRegistry, name: str, doc: str, labels: tuple[str, ...] = ()
    ) -> None:
        self._counter = Counter(name, doc, labels, registry=registry)
        self._seen: dict[tuple[str, ...], float] = {}

    def set(self, total: float, *labels: str) -> None:
        """The total as of now; smaller than before means that its keeper started over from 0."""
        seen = self._seen.get(labels, 0.0)
        counter = self._counter.labels(*labels) if labels else self._counter
        counter.inc(total - seen if total >= seen else total)
        self._seen[labels] = total

    def inc(self, *labels: str) -> None:
        """One more, of what nobody else keeps a total of."""
        self._counter.labels(*labels).inc()

    def set_all(self, totals: Mapping[str, float] | Mapping[tuple[str, str], float]) -> None:
        """Totals by the one label, or by all of them."""
        for labels, total in totals.items():
            self.set(total, *((labels,) if isinstance(labels, str) else labels))


class WorkerMetrics:
    """All of them, in a registry of their own. Event-loop thread only."""

    def __init__(self) -> None:
        r = self.registry = CollectorRegistry()
        self.blocks = Gauge(
            "pdserve_kv_blocks",
            "KV blocks by state; the five states add up to the pool.",
            ["state"],
            registry=r,
        )
        self.load_s = Gauge("pdserve_model_load_seconds", "What loading the model took.", registry=r)
        self.model_bytes = Gauge("pdserve_model_bytes", "Size of the model's weights as stored.", registry=r)
        self.loaded_bytes = Gauge(
            "pdserve_model_loaded_bytes", "Bytes of the weights that are loaded.", registry=r
        )
        self.ranks = Gauge(
            "pdserve_worker_ranks", "Processes that share the model: engine.tensor_parallel.", registry=r
        )
        self.ranks.set(1)
        self.running = Gauge("pdserve_running_sequences", "Sequences in the batch.", registry=r)
        self.waiting = Gauge(
            "pdserve_waiting_requests", "Requests that wait for blocks or their turn.", registry=r
        )
        self.queued_tokens = Gauge(
            "pdserve_queued_prompt_tokens", "Prompt tokens of requests that wait.", registry=r
        )
        self.draining = Gauge("pdserve_draining", "1 while the worker drains.", registry=r)
        self.routers = Gauge("pdserve_routers_joined", "Routers that it has joined.", registry=r)
        self.steps = Total(r, "pdserve_steps", "Engine steps.")
        self.step_s = Histogram("pdserve_step_seconds", "One engine step.", registry=r, buckets=_STEP_S)
        self.prefill_tokens = Total(
            r, "pdserve_prefill_tokens", "Prompt tokens computed, aborted prompts' too; hits not among them."
        )
        self.aborted_prefill_tokens = Total(
            r,
            "pdserve_prefill_tokens_aborted",
            "Prompt tokens computed for prompts that ended before a first token.",
        )
        self.decode_tokens = Total(r, "pdserve_decode_tokens", "Tokens sampled.")
        self.cache_query_tokens = Total(
            r, "pdserve_cache_query_tokens", "Prompt tokens looked up in the cache."
        )
        self.cache_hit_tokens = Total(r, "pdserve_cache_hit_tokens", "Prompt tokens found in the cache.")
        self.preemptions = Total(r, "pdserve_preemptions", "Running sequences whose blocks were taken back.")
        self.masks = Total(r, "pdserve_structure_masks", "Token masks made for structures.")
        self.mask_s = Total(
            r, "pdserve_structure_mask_seconds", "What making token masks took, between steps."
        )
        self.revocations = Total(r, "pdserve_revocations", "Grants taken back before their commit.")
        self.books_wrong = Total(
            r, "pdserve_books_wrong", "Times that books didn't add up; the worker then drains.", ("book",)
        )
        self.ignored = Total(
            r, "pdserve_ignored_messages", "Messages that came too late, or once more, by kind.", ("kind",)
        )
        self.attempts = Gauge(
            "pdserve_worker_attempts", "Attempts in hand, by state of their role.", ["state"], registry=r
        )
        self.sequences = Gauge(
            "pdserve_sequences", "Sequences in the scheduler, by state.", ["state"], registry=r
        )
        self.lease_states = Gauge(
            "pdserve_lease_states", "Leases in hand by state of this worker's end.", ["state"], registry=r
        )
        self.quarantine_age_s = Gauge(
            "pdserve_quarantine_age_seconds", "Age of the oldest quarantine of a block; 0: none.", registry=r
        )
        self.failures = Total(
            r, "pdserve_failures", "Attempts that failed or were refused here, by error.", ("error",)
        )
        self.kv_bytes = Total(r, "pdserve_kv_transfer_bytes", "KV bytes by direction.", ("direction",))
        self.kv_transfer_s = Total(r, "pdserve_kv_transfer_seconds", "First pull to last byte of hand-offs.")
        self.handed_off = Total(r, "pdserve_kv_handoffs", "Leases by how they ended.", ("outcome",))
        self.links = Gauge("pdserve_links", "Links that are up.", registry=r)
        self.links_lost = Total(r, "pdserve_links_lost", "Links that broke or fell silent.")
        self.links_pushed_out = Total(
            r, "pdserve_links_pushed_out", "Strangers in a link's handshake who made room for later ones."
        )
        self.fell_back = Total(
            r, "pdserve_links_fell_back", "Transports that failed, so that a link took the next.", ("peer",)
        )
        self.communicators = Gauge(
            "pdserve_nccl_communicators", "Live communicators, those being freed included.", registry=r
        )
        self.freed_communicators = Total(r, "pdserve_nccl_communicators_freed", "Communicators freed.")
        self.mapped_pools = Gauge(
            "pdserve_cuda_ipc_mapped_pools", "Other workers' pools that are mapped.", registry=r
        )
        self.pending_reads = Gauge(
            "pdserve_cuda_ipc_pending_reads", "Copies from other workers' pools under way.", registry=r
        )
        self.staging_bytes = Gauge(
            "pdserve_kv_staging_bytes",
            "Pinned memory in use by pieces on their way through the host.",
            registry=r,
        )
        self.staging_copies = Gauge(
            "pdserve_kv_staging_copies", "Copies between the pool and that memory under way.", registry=r
        )
        self.leases = Gauge("pdserve_leases", "Leases in hand.", registry=r)
        self.stale = Total(
            r, "pdserve_kv_stale", "Frames of a dead lease or generation, by peer and kind.", ("peer", "kind")
        )
        self.corrupt = Total(r, "pdserve_kv_corrupt", "Pieces with a wrong checksum, by sender.", ("peer",))
        self.malformed = Total(r, "pdserve_kv_malformed", "Links ended by an impossible frame.", ("peer",))
        self.unproven = Total(
            r,
            "pdserve_links_unproven",
            "Links refused for want of a proof, by what asks for it.",
            ("setting",),
        )
        self._unknown = Total(
            r,
            "pdserve_unknown_messages",
            "Messages and frames of a later version of the wire that were skipped (kind), or in part (field).",
            ("channel", "what"),
        )
        self._energy: Total | None = None
        for state in _STATES:
            self.blocks.labels(state).set(0)

    def count_unknown(self, channel: str, what: str) -> None:
        """One more message of a later version."""
        self._unknown.inc(channel, what)

    def set_unknown_frames(self, totals: Mapping[str, int]) -> None:
        """Of links, by what wasn't known."""
        for what, total in totals.items():
            self._unknown.set(total, "link", what)

    def set_energy(self, joules: float, phase: str) -> None:
        """The total of a phase. Until it is first called there is no such metric: unknown is not zero."""
        if self._energy is None:
            self._energy = Total(
                self.registry, "pdserve_energy_joules", "Energy of engine steps.", ("phase",)
            )
        self._energy.set(joules, phase)

    def on_load(self, load: Load) -> None:
        """Take over what the worker tells its routers."""
        for state in _STATES:
            self.blocks.labels(state).set(getattr(load.blocks, state))
        self.running.set(load.num_running)
        self.waiting.set(load.num_waiting)
        self.queued_tokens.set(load.num_queued_tokens)
        self.draining.set(load.draining)
        self.cache_query_tokens.set(load.num_cache_query_tokens)
        self.cache_hit_tokens.set(load.num_cache_hit_tokens)
