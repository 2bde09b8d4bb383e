"""Any mix of requests, aborts, grants and tiny pools: the texts are right, nobody starves, no block leaks, it ends."""

from __future__ import annotations

from collections import deque

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pdserve.engine.block_pool import BlockState
from pdserve.engine.engine import Engine
from pdserve.engine.events import ChunkDone, EngineEvent, HandedBackSeq, Preempted, RowDied, Sampled, StepDied
from pdserve.engine.fake_rule import EOS_ID, FakeRule, expected_choice
from pdserve.engine.fake_runner import FakeFaults, FakeRunner
from pdserve.engine.scheduler import EngineLimits
from pdserve.engine.sequence import Sequence, SequenceState
from pdserve.sampling import SampleKey, SamplingParams
from tests.support.virtual_clock import VirtualClock

ROW_POISON = 1
STEP_POISON = 2
PICK = st.integers(0, 10_000)
RULE = FakeRule(eos_one_in=40)

# Prompts share beginnings, so that hits, shared blocks and known hashes are common.
PROMPT = st.tuples(
    st.sampled_from([[], [65] * 6, [65] * 6 + [66] * 9]),
    st.lists(st.sampled_from([65, 66]), min_size=1, max_size=8),
).map(lambda parts: [*parts[0], *parts[1]])


@st.composite
def limits(draw: st.DrawFn) -> EngineLimits:
    max_batch = draw(st.integers(1, 4))
    return EngineLimits(
        max_batch=max_batch,
        max_step_tokens=max_batch + draw(st.integers(1, 12)),
        chunk_tokens=draw(st.integers(1, 12)),
        decode_prefill_tokens=draw(st.sampled_from([None, 1, 3, 8])),
        recompute_max_tokens=draw(st.sampled_from([None, None, 0, 10])),
        prefix_cache=draw(st.booleans()),
    )


class EngineMachine(RuleBasedStateMachine):
    """The test is the role core: it queues what can't be reserved yet, holds grants, ends what is over."""

    @initialize(num_blocks=st.integers(2, 20), block_size=st.integers(1, 5), limits=limits())
    def build(self, num_blocks: int, block_size: int, limits: EngineLimits) -> None:
        faults = FakeFaults(row_token_ids=frozenset([ROW_POISON]), step_token_ids=frozenset([STEP_POISON]))
        runner = FakeRunner(num_blocks=num_blocks, block_size=block_size, rule=RULE, faults=faults)
        self.clock = VirtualClock()
        self.engine = Engine(runner, limits, self.clock)
        self.limits = limits
        self.waiting: deque[tuple[Sequence, bool]] = deque()
        self.live: dict[int, Sequence] = {}
        self.prompts: dict[int, list[int]] = {}
        self.over: dict[int, str] = {}
        self.aborted: set[int] = set()
        self.granted: list[list[int]] = []

    # --- what comes in

    @rule(
        prompt=PROMPT,
        max_tokens=st.integers(1, 25),
        seed=st.integers(0, 3),
        then_decode=st.booleans() | st.just(True),
        strikes=st.sampled_from([0, 0, 0, 1]),
        poison=st.sampled_from([0, 0, 0, 0, 0, 0, ROW_POISON, STEP_POISON]),
        greedy=st.booleans(),
    )
    def submit(
        self,
        prompt: list[int],
        max_tokens: int,
        seed: int,
        then_decode: bool,
        strikes: int,
        poison: int,
        greedy: bool,
    ) -> None:
        prompt = [*prompt, poison] if poison else prompt
        prompt = prompt[-(self.engine.window_tokens - 1) :]
        max_tokens = min(max_tokens, self.engine.window_tokens - len(prompt))
        key = SampleKey(
            params=SamplingParams(temperature=0.0 if greedy else 1.0),
            seed=seed,
            choice=0,
            eos_token_ids=(EOS_ID,),
            max_tokens=max_tokens,
        )
        handle = len(self.prompts) + 1
        self.prompts[handle] = prompt
        seq = Sequence(
            handle=handle,
            session_id=0,
            ids=list(prompt),
            num_prompt_tokens=len(prompt),
            key=key,
            num_strikes=strikes,
        )
        self.live[handle] = seq
        self.waiting.append((seq, then_decode))
        self.admit()

    def admit(self) -> None:
        while self.waiting:
            seq, then_decode = self.waiting[0]
            if not self.engine.reserve_prefill(seq, then_decode=then_decode):
                return
            assert seq.num_uncomputed >= 1
            self.engine.start_prefill(seq, then_decode=then_decode)
            self.waiting.popleft()

    @rule(pick=PICK, cache=st.booleans(), hold=st.booleans())
    @precondition(lambda self: self.live)
    def abort(self, pick: int, cache: bool, hold: bool) -> None:
        handle = list(self.live)[pick % len(self.live)]
        seq = self.live[handle]
        self.waiting = deque((other, then) for other, then in self.waiting if other is not seq)
        self.aborted.add(handle)
        self.end(seq, "aborted", cache=cache, hold_s=2.0 if hold else None)
        self.admit()

    @rule(n=st.integers(1, 5))
    def grant(self, n: int) -> None:
        if self.engine.num_preempted == 0 and (blocks := self.engine.pool.grant(n)) is not None:
            self.granted.append(blocks)

    @rule()
    @precondition(lambda self: self.granted)
    def drop_granted(self) -> None:
        self.engine.pool.free_granted(self.granted.pop())
        self.admit()

    @rule(by_s=st.sampled_from([0.1, 3.0]))
    def wait(self, by_s: float) -> None:
        self.clock.advance(by_s)

    # --- steps

    @rule(n=st.integers(1, 6))
    def steps(self, n: int) -> None:
        for _ in range(n):
            self.step()

    def step(self) -> None:
        engine = self.engine
        had_work = engine.has_work
        running = [seq for seq in engine.sequences if seq.state is SequenceState.RUNNING]
        prefilling = [seq for seq in engine.sequences if seq.state is SequenceState.PREFILLING]
        preempted = [seq for seq in engine.sequences if seq.state is SequenceState.PREEMPTED]
        computed = {seq.handle: seq.num_computed for seq in engine.sequences}
        num_steps = engine.num_steps
        events = engine.step()
        assert bool(events) == had_work
        assert engine.num_steps - num_steps == (
            1 if any(not isinstance(e, Preempted | HandedBackSeq) for e in events) else 0
        )
        self.check_budget(events, computed)
        self.check_nobody_left_out(events, running, prefilling)
        self.check_victims(events, [*running, *prefilling], preempted)
        for event in events:
            self.take(event)
        self.admit()

    def check_budget(self, events: list[EngineEvent], computed: dict[int, int]) -> None:
        chunks = {e.seq.handle: e.num_computed for e in events if isinstance(e, ChunkDone)}
        decodes = [e for e in events if isinstance(e, Sampled) and e.seq.handle not in chunks]
        # Of one that came back in this very step, only the lower bound of what it computed is known.
        known = [n - computed[h] for h, n in chunks.items() if computed[h] > 0]
        assert all(n <= self.limits.chunk_tokens for n in known)
        assert len(decodes) <= self.limits.max_batch
        assert sum(known) + len(decodes) <= self.limits.max_step_tokens
        if decodes and self.limits.decode_prefill_tokens is not None:
            assert sum(known) <= self.limits.decode_prefill_tokens

    def check_nobody_left_out(
        self, events: list[EngineEvent], running: list[Sequence], prefilling: list[Sequence]
    ) -> None:
        """Without struck ones, each that runs has a row in each step and the oldest prefill moves."""
        chunked = [event.seq for event in events if isinstance(event, ChunkDone)]
        if any(isinstance(event, StepDied) for event in events):
            return
        named = [event.seq for event in events if not isinstance(event, StepDied)]
        if any(seq.num_strikes for seq in (*running, *prefilling, *named)):
            return
        touched = {seq.handle for seq in named}
        if len(running) <= self.limits.max_batch:
            assert {seq.handle for seq in running} <= touched
        if prefilling and all(seq in prefilling for seq in chunked):
            assert prefilling[0].handle in touched

    def check_victims(
        self, events: list[EngineEvent], holding: list[Sequence], preempted: list[Sequence]
    ) -> None:
        """The youngest lose their blocks; old victims come back first, and only with room for all to grow."""
        taken = [event.seq for event in events if isinstance(event, Preempted | HandedBackSeq)]
        kept = [seq for seq in holding if seq.then_decode and seq not in taken]
        assert all(seq.age_key < victim.age_key for seq in kept for victim in taken)
        back = [seq for seq in preempted if seq.state is not SequenceState.PREEMPTED]
        assert back == preempted[: len(back)]
        # Who is handed back leaves its room to those that wait; who is preempted left none.
        assert not (back and any(isinstance(event, Preempted) for event in events))

    def take(self, event: EngineEvent) -> None:
        match event:
            case StepDied(seqs, _, sound):
                assert sound
                assert any(STEP_POISON in self.prompts[seq.handle] for seq in seqs)
                for seq in seqs:
                    self.end(seq, "step died")
            case RowDied(seq, _):
                assert ROW_POISON in self.prompts[seq.handle]
                self.end(seq, "row died")
            case HandedBackSeq(seq):
                assert self.limits.recompute_max_tokens is not None
                assert len(seq.ids) > self.limits.recompute_max_tokens
                assert seq.block_table == []
                self.end(seq, "handed back")
            case Sampled(seq, token_id, _, finish, first):
                assert seq.ids[-1] == token_id
                assert first == (seq.num_generated == 1)
                if finish is not None or not seq.then_decode:
                    self.check_text(seq, whole=finish is not None)
                    self.end(seq, "done")
            case Preempted(seq):
                assert seq.then_decode
                assert seq.block_table == []
            case ChunkDone(seq, num_computed):
                assert num_computed <= len(seq.ids)

    def check_text(self, seq: Sequence, *, whole: bool) -> None:
        expected = expected_choice(self.prompts[seq.handle], seq.key, rule=RULE)
        text = seq.ids[seq.num_prompt_tokens :]
        assert text == (expected if whole else expected[: len(text)])

    def end(self, seq: Sequence, how: str, *, cache: bool = True, hold_s: float | None = None) -> None:
        assert seq.handle not in self.over, "every sequence ends once"
        self.over[seq.handle] = how
        self.engine.end(seq, cache=cache, hold_s=hold_s)
        del self.live[seq.handle]

    # --- what always holds

    @invariant()
    def blocks_belong_to_somebody(self) -> None:
        pool = self.engine.pool
        assert pool.adds_up()
        assert pool.available >= 0
        references: dict[int, int] = {}
        for seq in self.live.values():
            assert len(set(seq.block_table)) == len(seq.block_table)
            assert len(seq.block_table) * pool.block_size >= seq.num_computed
            for block_id in seq.block_table:
                references[block_id] = references.get(block_id, 0) + 1
        for block_id in range(pool.num_blocks):
            assert pool.num_references(block_id) == references.get(block_id, 0)
            assert (pool.state(block_id) is BlockState.OWNED) == (block_id in references)
        assert pool.counts().granted == sum(map(len, self.granted))
        if not self.limits.prefix_cache:
            assert pool.counts().cached == 0

    def teardown(self) -> None:
        """Without grants everything runs to its end, and nothing is left."""
        if not hasattr(self, "engine"):
            return
        while self.granted:
            self.engine.pool.free_granted(self.granted.pop())
        self.admit()
        bound = self.engine.num_steps + 4_000
        while self.live:
            assert self.engine.has_work, "it hangs"
            assert self.engine.num_steps < bound, "it doesn't end"
            self.step()
        assert sorted(self.over) == sorted(self.prompts)
        counts = self.engine.pool.counts()
        assert (counts.granted, counts.owned, counts.quarantined) == (0, 0, 0)
        assert self.engine.sequences == []


EngineMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
TestEngineMachine = EngineMachine.TestCase
