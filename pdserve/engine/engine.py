"""Pool, scheduler and runner of one worker: a pure function of its inputs, whatever the role."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import structlog

from pdserve.clock import Clock
from pdserve.engine.ahead import StepAhead, decodes
from pdserve.engine.block_pool import BlockPool
from pdserve.engine.events import ChunkDone, EngineEvent, PromptScored, RowDied, Sampled, StepDied
from pdserve.engine.phase_energy import PhaseEnergy
from pdserve.engine.port import LaunchingRunner, Row, RowOutput, Runner, SampleSpec, ScoreSpec
from pdserve.engine.scheduler import EngineLimits, PlannedRow, Scheduler
from pdserve.engine.sequence import Sequence, SequenceState
from pdserve.engine.sequence_blocks import SequenceBlocks
from pdserve.engine.step_stats import EngineLoad, StepStats
from pdserve.errors import InvariantViolated, RowFailed, StepFailed
from pdserve.sampling import FinishReason
from pdserve.token_mask import TokenMask
from pdserve.token_matcher import finish_by

log = structlog.get_logger()


class Engine:
    """Runs sequences over one pool. Synchronous; its owner alone calls it.

    A sequence's way: `reserve_prefill` → `start_prefill`, or `start_decode` after a hand-off; events of `step`; and
    always `end`. `num_steps` counts steps that ran, failed ones too; `energy` adds up what they took, `num_masks` and
    `mask_s` the masks of structures. Of `num_prefilled_tokens` those of sequences that have ended without a first token
    are `num_aborted_prefill_tokens`.
    """

    def __init__(self, runner: Runner, limits: EngineLimits, clock: Clock) -> None:
        layout = runner.layout
        self.runner = runner
        self.limits = limits
        self.pool = BlockPool(layout.num_blocks, layout.block_size, clock)
        self.num_steps = 0
        self.energy = PhaseEnergy()  # of all steps
        self.num_prefilled_tokens = 0
        self.num_aborted_prefill_tokens = 0
        self.num_masks = 0
        self.mask_s = 0.0  # what making them took
        self._clock = clock
        self._blocks = SequenceBlocks(self.pool, runner.card.cache_seed, prefix_cache=limits.prefix_cache)
        self._scheduler = Scheduler(self._blocks, limits)
        self._ahead = (
            StepAhead(runner, self._scheduler, self._blocks) if isinstance(runner, LaunchingRunner) else None
        )
        self._stats = StepStats(clock)
        self._num_admitted = 0
        self._num_hit_tokens = 0
        self._num_query_tokens = 0

    # --- what there is

    @property
    def window_tokens(self) -> int:
        """The longest sequence that can be served: the model's window, or the whole pool if that is smaller."""
        return min(self.runner.card.window_tokens, self.pool.num_blocks * self.pool.block_size)

    @property
    def has_work(self) -> bool:
        """Whether `step` would run something now, or read what runs; a call or a message may change it."""
        return self._scheduler.has_work or (self._ahead is not None and self._ahead.launched is not None)

    @property
    def num_preempted(self) -> int:
        """Sequences that wait to be recomputed. While there are any, nothing new may take blocks."""
        return len(self._scheduler.preempted)

    @property
    def sequences(self) -> list[Sequence]:
        """All in the scheduler: prefilling, running, preempted."""
        return [*self._scheduler.prefilling, *self._scheduler.running, *self._scheduler.preempted]

    @property
    def oldest(self) -> Sequence | None:
        """The sequence with the earliest first admission, of those that decode here; for the rule of admission."""
        return min(
            (seq for seq in self.sequences if seq.then_decode), key=lambda seq: seq.age_key, default=None
        )

    def load(self) -> EngineLoad:
        """The figures of a load report."""
        scheduler = self._scheduler
        waiting = scheduler.preempted
        queued = [seq.num_uncomputed for seq in (*scheduler.prefilling, *waiting)]
        return EngineLoad(
            num_running=len(scheduler.running) + len(scheduler.prefilling),
            num_waiting=len(waiting),
            num_queued_tokens=sum(queued),
            num_queued_short_tokens=sum(
                num_tokens for num_tokens in queued if self.limits.is_short(num_tokens)
            ),
            num_cache_hit_tokens=self._num_hit_tokens,
            num_cache_query_tokens=self._num_query_tokens,
            prefill_tokens_per_s=self._stats.prefill_tokens_per_s,
            step_s=self._stats.step_s,
            slowest_step_s=self._stats.slowest_step_s,
        )

    # --- a sequence's way

    def find_hits(self, seq: Sequence) -> list[int]:
        """All leading full blocks of a sequence that the pool has, for a grant: its logits are made elsewhere."""
        return self._blocks.find_hits(seq, len(seq.ids) // self.pool.block_size)

    def reserve_prefill(self, seq: Sequence, *, then_decode: bool = False) -> bool:
        """Take all blocks of its ids (and of the token behind them, if it decodes here), its hits among them.

        False, and nothing is taken, if they aren't available or if preempted sequences come first.
        """
        self._require(seq, SequenceState.NEW, "reserve")
        if self._scheduler.preempted:
            return False
        if not self._blocks.reserve(seq, len(seq.ids) + (1 if then_decode else 0)):
            return False
        seq.state = SequenceState.RESERVED
        seq.num_cached_tokens = seq.num_computed
        self._num_hit_tokens += seq.num_computed
        self._num_query_tokens += len(seq.ids)
        return True

    def start_prefill(self, seq: Sequence, *, then_decode: bool) -> None:
        """Compute and sample; without then_decode it leaves the scheduler with its first token, blocks kept."""
        self._require(seq, SequenceState.RESERVED, "start_prefill")
        seq.then_decode = then_decode
        self._admit(seq)
        self._scheduler.add_prefill(seq)

    def start_decode(self, seq: Sequence) -> None:
        """Run a sequence whose KV was handed off: its block table holds that of ids[:-1], one reference on each.

        seq.num_cached_tokens is the owner's to set (hits of the grant).
        """
        self._require(seq, SequenceState.NEW, "start_decode")
        if len(seq.ids) < 2 or len(seq.block_table) < self._blocks.num_for(len(seq.ids) - 1):
            raise InvariantViolated(
                "a hand-off without its blocks",
                handle=seq.handle,
                tokens=len(seq.ids),
                blocks=len(seq.block_table),
            )
        seq.then_decode = True
        seq.has_sampled = True
        seq.num_computed = len(seq.ids) - 1
        self._admit(seq)
        self._blocks.publish(seq)
        self._scheduler.add_running(seq)

    def end(self, seq: Sequence, *, hold_s: float | None = None, cache: bool = True) -> None:
        """Take a sequence out in whatever state it is and release its blocks; idempotent.

        hold_s  its cached blocks are evicted last for so long
        cache   False: its KV is in doubt, nothing of it stays findable
        """
        if seq.state is SequenceState.ENDED:
            return
        if self._ahead is not None:
            self._ahead.settle(seq)
        self._scheduler.remove(seq)
        if not seq.has_sampled:
            self.num_aborted_prefill_tokens += seq.num_prefilled
        seq.may_be_cached = seq.may_be_cached and cache
        hold_until_s = None if hold_s is None else self._clock.now_s() + hold_s
        self._blocks.release(seq, hold_until_s=hold_until_s)
        seq.state = SequenceState.ENDED
        if self._ahead is not None:
            self._ahead.drop_if_dead()
        if not self.has_work:
            self._stats.rest()

    # --- a step

    def step(self) -> list[EngineEvent]:
        """Run one batch; [] if nothing can run. Errors of the model become events; only our own bugs raise."""
        events: list[EngineEvent] = []
        launched = None if self._ahead is None else self._ahead.launched
        planned, rows = launched or self._plan(events)
        if not rows:
            return events
        self._stats.begin()
        self.num_steps += 1
        # Of the first chunk of each row that isn't a decode: counted before the rows' states change.
        num_prefill_tokens = sum(
            row.num_tokens for row in planned if row.seq.state is SequenceState.PREFILLING
        )
        try:
            outputs = self._run(planned, rows)
        except (
            Exception
        ) as error:  # the model's outermost frame: whatever it raises ends these sequences, no others
            events.append(
                self._step_died([row for row in planned if launched is None or decodes(row)], error)
            )
        else:
            for row, output in zip(planned, outputs, strict=True):
                if launched is None or decodes(row):
                    self._take_output(row, output, events)
        self._stats.end(num_prefill_tokens=num_prefill_tokens, more_follows=self.has_work)
        return events

    def _plan(self, events: list[EngineEvent]) -> tuple[list[PlannedRow], list[Row]]:
        """The next step, and whose blocks it took."""
        plan = self._scheduler.plan(self._stats.speed_tokens_per_s)
        events += plan.taken
        for taken in plan.taken:
            log.info(
                "sequence.preempted",
                handle=taken.seq.handle,
                **taken.seq.name.logged,
                num_tokens=len(taken.seq.ids),
                how=type(taken).__name__,
            )
        return self._rows(plan.rows, events)

    def _rows(
        self, planned: Seq[PlannedRow], events: list[EngineEvent]
    ) -> tuple[list[PlannedRow], list[Row]]:
        """What the runner is given; a sequence whose structure can no longer be followed dies before it."""
        living: list[PlannedRow] = []
        rows: list[Row] = []
        for row in planned:
            try:
                rows.append(_row(row, self._mask(row)))
            except RowFailed as error:
                self._row_died(row.seq, error, events)
            else:
                living.append(row)
        return living, rows

    def _mask(self, row: PlannedRow) -> TokenMask | None:
        """The tokens that its structure allows next. Raises RowFailed."""
        matcher = row.seq.matcher
        if matcher is None or not row.samples:
            return None
        begun_s = self._clock.now_s()
        mask = matcher.mask()
        self.num_masks += 1
        self.mask_s += self._clock.now_s() - begun_s
        return mask

    def _run(self, planned: list[PlannedRow], rows: list[Row]) -> list[RowOutput]:
        outputs = self.runner.run(rows) if self._ahead is None else self._ahead.run(planned, rows)
        if len(outputs) != len(planned):
            raise InvariantViolated(
                "a runner returned the wrong number of outputs", rows=len(planned), outputs=len(outputs)
            )
        for plan, row, output in zip(planned, rows, outputs, strict=True):
            if output.error is not None:
                continue
            if plan.samples and output.token_id is None:
                raise InvariantViolated(
                    "a runner returned neither a token nor an error", handle=plan.seq.handle
                )
            if row.score is not None and len(output.scores) != len(row.score.next_ids):
                raise InvariantViolated(
                    "a runner returned the wrong number of scores", handle=plan.seq.handle
                )
        return outputs

    def _take_output(self, row: PlannedRow, output: RowOutput, events: list[EngineEvent]) -> None:
        seq = row.seq
        token_id = output.token_id
        error = output.error
        if output.energy_j is not None:
            self._count_energy(seq, output.energy_j)
        if error is None and token_id is not None and not 0 <= token_id < self.runner.card.vocab_size:
            error = RowFailed("sampled an id outside the vocabulary", token_id=token_id)
        finish: FinishReason | None = None
        if error is None and row.samples and token_id is not None:
            try:
                finish = finish_by(seq.key, token_id, seq.num_generated + 1, seq.matcher)
            except RowFailed as broken:
                error = broken
        if error is not None:
            self._row_died(seq, error, events)
            return
        if output.scores:
            first = max(seq.num_computed + 1, seq.num_scored)
            seq.num_scored = first + len(output.scores)
            events.append(PromptScored(seq, first, output.scores))
        seq.num_computed += row.num_tokens
        if not seq.has_sampled:
            seq.num_prefilled += row.num_tokens
            self.num_prefilled_tokens += row.num_tokens
        self._blocks.publish(seq)
        if seq.state is SequenceState.PREFILLING:
            events.append(ChunkDone(seq, seq.num_computed))
        if not row.samples:
            return
        assert token_id is not None, "checked behind the runner"
        seq.ids.append(token_id)
        first, seq.has_sampled, seq.takes_hits = not seq.has_sampled, True, True
        if finish is not None or not seq.then_decode:
            self._leave(seq)
        elif seq.state is SequenceState.PREFILLING:
            self._scheduler.remove(seq)
            self._scheduler.add_running(seq)
        events.append(Sampled(seq, token_id, output.logprobs, finish, first))

    def _row_died(self, seq: Sequence, error: RowFailed, events: list[EngineEvent]) -> None:
        log.warning("sequence.died", handle=seq.handle, **seq.name.logged, error=str(error))
        seq.may_be_cached = False
        self._leave(seq)
        events.append(RowDied(seq, error))

    def _step_died(self, planned: Seq[PlannedRow], cause: Exception) -> StepDied:
        sound = self.pool.adds_up() and self.runner.card.step_errors_are_sound
        attempts = [{"handle": row.seq.handle, **row.seq.name.logged} for row in planned]
        log.error("step.died", step=self.num_steps, attempts=attempts, sound=sound, exc_info=cause)
        for row in planned:
            self._leave(row.seq)
        error = StepFailed(
            "the engine step raised", step=self.num_steps, cause=f"{type(cause).__name__}: {cause}"
        )
        error.__cause__ = cause
        return StepDied(tuple(row.seq for row in planned), error, sound)

    def _count_energy(self, seq: Sequence, joules: float) -> None:
        for energy in (seq.energy, self.energy):
            if seq.has_sampled:
                energy.add_decode(joules)
            else:
                energy.add_prefill(joules)

    def _admit(self, seq: Sequence) -> None:
        self._num_admitted += 1
        seq.serial = self._num_admitted
        if seq.admitted_s is None:
            seq.admitted_s = self._clock.now_s()

    def _leave(self, seq: Sequence) -> None:
        self._scheduler.remove(seq)
        seq.state = SequenceState.LEFT

    def _require(self, seq: Sequence, state: SequenceState, call: str) -> None:
        if seq.state is not state:
            raise InvariantViolated(
                f"{call} isn't allowed in this state", handle=seq.handle, state=seq.state.value
            )


def _row(row: PlannedRow, mask: TokenMask | None) -> Row:
    seq = row.seq
    end = seq.num_computed + row.num_tokens
    token_ids = seq.ids[-1:] if row.num_tokens == 1 and row.samples else seq.ids[seq.num_computed : end]
    sample = SampleSpec(seq.key, seq.ids, seq.num_prompt_tokens, mask) if row.samples else None
    return Row(token_ids, seq.num_computed, seq.block_table, sample, _score(seq, end))


def _score(seq: Sequence, end: int) -> ScoreSpec | None:
    """The prompt tokens that positions num_computed … end − 1 can tell the logprobs of, if any are wanted."""
    top = seq.key.params.prompt_logprobs
    if top is None or seq.has_sampled:
        return None
    first = max(seq.num_computed + 1, seq.num_scored)
    next_ids = seq.ids[first : min(end + 1, seq.num_prompt_tokens)]
    return ScoreSpec(next_ids, first - 1 - seq.num_computed, top) if next_ids else None
