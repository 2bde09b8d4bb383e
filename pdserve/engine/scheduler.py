"""Which positions the next step computes: one scheduler for all roles, which are limits on it.

A step has one row for each running sequence (decodes), and what is left of its token budget goes to the prefilling
ones. A decode row is never left out for a chunk, and at least one token of every step is a prefill's if one waits.
Prefills go in two lanes, oldest first in each: what is done in one chunk may have half of the budget before the others,
so a short prompt doesn't wait for a long one, and a long one takes at most twice as long. Ages are first admissions: a
preempted sequence that comes back stands before all younger ones.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field

from pdserve.engine.events import HandedBackSeq, Preempted
from pdserve.engine.sequence import Sequence, SequenceState
from pdserve.engine.sequence_blocks import SequenceBlocks
from pdserve.errors import InvariantViolated

LEAST_CHUNK_TOKENS = 16  # however slow the engine is


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """What makes a role of the one scheduler.

    max_step_tokens        positions computed in one step
    max_batch              decode rows, and as many prefill rows, in one step
    chunk_tokens           positions of one sequence in one step
    decode_prefill_tokens  prefill positions in a step while others run; None: no bound of its own (role `both`)
    prefill_step_s         a step takes no more prefill positions than it can compute in so long, by the speed of late
    recompute_max_tokens   a longer preempted sequence is handed back instead of recomputed; None: never
    prefix_cache           whether full blocks become hits
    """

    max_step_tokens: int = 512
    max_batch: int = 64
    chunk_tokens: int = 512
    decode_prefill_tokens: int | None = 64
    prefill_step_s: float = 2.0
    recompute_max_tokens: int | None = 2048
    prefix_cache: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.max_batch < self.max_step_tokens:
            raise ValueError(
                f"want 1 <= max_batch < max_step_tokens, or a full batch starves prefills: {self}"
            )
        if self.chunk_tokens < 1:
            raise ValueError(f"want chunk_tokens >= 1, got {self.chunk_tokens}")
        if self.decode_prefill_tokens is not None and self.decode_prefill_tokens < 1:
            raise ValueError(f"want decode_prefill_tokens >= 1 or none, got {self.decode_prefill_tokens}")
        if self.recompute_max_tokens is not None and self.recompute_max_tokens < 0:
            raise ValueError(f"want recompute_max_tokens >= 0 or none, got {self.recompute_max_tokens}")

    def most_prefill_tokens(self, tokens_per_s: float) -> int:
        """Of all prefills in one step, at this speed; a power of two where it is a bound, so that it seldom changes."""
        in_time = max(LEAST_CHUNK_TOKENS, int(tokens_per_s * self.prefill_step_s))
        if tokens_per_s <= 0 or in_time >= self.max_step_tokens:
            return self.max_step_tokens
        return 1 << (in_time.bit_length() - 1)

    def is_short(self, num_tokens: int) -> bool:
        """Whether a prefill of so many tokens is in the short lane: done in one chunk."""
        return num_tokens <= self.chunk_tokens


@dataclass(frozen=True, slots=True)
class PlannedRow:
    """Compute num_tokens positions of seq from num_computed on; they are all that is missing if `samples`."""

    seq: Sequence
    num_tokens: int
    samples: bool


@dataclass(slots=True)
class Plan:
    """One step: its rows, and who lost its blocks to make it possible."""

    rows: list[PlannedRow] = field(default_factory=list)
    taken: list[Preempted | HandedBackSeq] = field(default_factory=list)


class Scheduler:
    """Decides each step's rows and takes blocks from the youngest when the pool is out. Engine owner only.

    A sequence is in at most one of `running`, `_prefilling`, `_preempted`, as its state says.
    """

    def __init__(self, blocks: SequenceBlocks, limits: EngineLimits) -> None:
        self._blocks = blocks
        self._limits = limits
        self._running: dict[Sequence, None] = {}  # in turn order: the head has waited longest for a row
        self._prefilling: list[Sequence] = []  # oldest first
        self._preempted: list[Sequence] = []  # oldest first
        self._struck: dict[Sequence, None] = {}  # those that run alone, in turn order
        self._last_ran_alone = False

    # --- who is here

    @property
    def running(self) -> list[Sequence]:
        return list(self._running)

    @property
    def prefilling(self) -> list[Sequence]:
        return list(self._prefilling)

    @property
    def preempted(self) -> list[Sequence]:
        return list(self._preempted)

    @property
    def has_work(self) -> bool:
        """Whether `plan` would give a row: a preempted sequence that still has to wait for blocks is no work."""
        if self._running or self._prefilling:
            return True
        return bool(self._preempted) and self._blocks.fits(
            self._preempted[0], len(self._preempted[0].ids) + 1
        )

    @property
    def only_decodes(self) -> bool:
        """Whether the next step has a row for each running sequence and nothing else, whatever this one gives."""
        return (
            not (self._prefilling or self._preempted or self._struck)
            and len(self._running) <= self._limits.max_batch
        )

    def add_prefill(self, seq: Sequence) -> None:
        """Its blocks are reserved; chunks come in order of age."""
        seq.state = SequenceState.PREFILLING
        bisect.insort(self._prefilling, seq, key=_age_key)
        self._note_strikes(seq)

    def add_running(self, seq: Sequence) -> None:
        """All but its last position is computed; it has a row in the next step."""
        seq.state = SequenceState.RUNNING
        self._running[seq] = None
        self._note_strikes(seq)

    def remove(self, seq: Sequence) -> None:
        """Take it out, wherever it is; its state is the caller's to set."""
        if seq.state is SequenceState.RUNNING:
            del self._running[seq]
        elif seq.state is SequenceState.PREFILLING:
            self._prefilling.remove(seq)
        elif seq.state is SequenceState.PREEMPTED:
            self._preempted.remove(seq)
        self._struck.pop(seq, None)

    # --- the next step

    def plan(self, prefill_tokens_per_s: float = 0.0) -> Plan:
        """The rows of the next step, blocks included; no rows if nothing can run.

        prefill_tokens_per_s  of steps of late; 0 = not known
        """
        most = self._limits.most_prefill_tokens(prefill_tokens_per_s)
        self._readmit()
        plan = self._plan_rows(most)
        taken = plan.taken
        while not plan.rows and plan.taken and (self._running or self._prefilling):
            # Who was to run lost its blocks. Each round takes at least one, so this ends; none of them comes back
            # before the next step, or one step would both take its blocks and give it others.
            plan = self._plan_rows(most)
            taken += plan.taken
        return Plan(plan.rows, taken)

    def _plan_rows(self, most: int) -> Plan:
        """Of those that hold blocks. most: prefill tokens."""
        plan = Plan()
        alone = self._next_alone()
        if alone is None:
            self._plan_decodes(plan, [seq for seq in self._running if seq not in self._struck])
            self._plan_chunks(plan, [seq for seq in self._prefilling if seq not in self._struck], most)
        elif alone.state is SequenceState.RUNNING:
            self._plan_decodes(plan, [alone])
        else:
            self._plan_chunks(plan, [alone], most)
        self._last_ran_alone = alone is not None
        return plan

    def _readmit(self) -> None:
        """Bring preempted sequences back in order of age, each only with a block to spare for all that run."""
        while self._preempted:
            seq = self._preempted[0]
            num_growing = len(self._running) + sum(1 for other in self._prefilling if other.then_decode)
            if not self._blocks.reserve(seq, len(seq.ids) + 1, num_spare=num_growing):
                return
            self._preempted.pop(0)
            self.add_prefill(seq)

    def _next_alone(self) -> Sequence | None:
        """The struck sequence whose turn it is: every other step, or every step if there is nobody else."""
        if not self._struck:
            return None
        others = len(self._running) + len(self._prefilling) > len(self._struck)
        if others and self._last_ran_alone:
            return None
        seq = next(iter(self._struck))
        del self._struck[seq]
        self._struck[seq] = None
        return seq

    def _plan_decodes(self, plan: Plan, candidates: list[Sequence]) -> None:
        chosen = candidates[: self._limits.max_batch]
        for seq in sorted((seq for seq in chosen if self._blocks.is_short(seq)), key=_age_key):
            # An older one may have taken its blocks a moment ago.
            if seq.state is SequenceState.RUNNING:
                self._make_room(plan, seq)
        for seq in chosen:
            if seq.state is not SequenceState.RUNNING:
                continue
            plan.rows.append(PlannedRow(seq, 1, samples=True))
            if len(chosen) < len(candidates):
                del self._running[seq]
                self._running[seq] = None

    def _plan_chunks(self, plan: Plan, candidates: list[Sequence], most: int) -> None:
        limits = self._limits
        budget = min(limits.max_step_tokens - len(plan.rows), most)
        if self._running and limits.decode_prefill_tokens is not None:
            budget = min(budget, limits.decode_prefill_tokens)
        seqs = [seq for seq in candidates[: limits.max_batch] if seq.state is SequenceState.PREFILLING]
        for seq, num_tokens in zip(seqs, self._divide(seqs, budget), strict=True):
            if num_tokens:
                plan.rows.append(PlannedRow(seq, num_tokens, samples=num_tokens == seq.num_uncomputed))

    def _divide(self, seqs: list[Sequence], budget: int) -> list[int]:
        """How many tokens each prefill gets.

        If both lanes have some, half of the budget is each one's: what the short lane leaves of its half nobody gets,
        since it would only make the short ones' step longer.
        """
        limits = self._limits
        given = [0] * len(seqs)

        def give(lane: list[int], most: int) -> int:
            for index in lane:
                given[index] = min(seqs[index].num_uncomputed, limits.chunk_tokens, most)
                most -= given[index]
            return most

        is_short = [limits.is_short(seq.num_uncomputed) for seq in seqs]
        short = [index for index in range(len(seqs)) if is_short[index]]
        long = [index for index in range(len(seqs)) if not is_short[index]]
        for_long = budget
        if short:
            # The odd token is the oldest one's: of a budget of 1 a half is nothing.
            for_long = (budget + (not is_short[0])) // 2
        left = give(long, for_long)
        give(short, budget - for_long + left)
        return given

    # --- when the pool is out

    def _make_room(self, plan: Plan, seq: Sequence) -> None:
        """Give seq its next block, if need be at the cost of the youngest, which may be itself."""
        while not self._blocks.grow(seq):
            victim = self._youngest()
            self._preempt(plan, victim)
            if victim is seq:
                return

    def _youngest(self) -> Sequence:
        """Of those that hold blocks here and may lose them: what is prefilled for another worker is none."""
        prefilling = [seq for seq in self._prefilling if seq.then_decode]
        return max([*self._running, *prefilling[-1:]], key=_age_key)

    def _preempt(self, plan: Plan, seq: Sequence) -> None:
        self.remove(seq)
        self._blocks.release(seq)
        limit = self._limits.recompute_max_tokens
        if limit is not None and len(seq.ids) > limit:
            seq.state = SequenceState.LEFT
            plan.taken.append(HandedBackSeq(seq))
            return
        seq.state = SequenceState.PREEMPTED
        bisect.insort(self._preempted, seq, key=_age_key)
        plan.taken.append(Preempted(seq))

    def _note_strikes(self, seq: Sequence) -> None:
        if seq.num_strikes < 0:
            raise InvariantViolated("negative strikes", handle=seq.handle)
        if seq.num_strikes > 0:
            self._struck[seq] = None


def _age_key(seq: Sequence) -> tuple[float, int]:
    return seq.age_key
