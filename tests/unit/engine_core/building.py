"""What these tests build engines and sequences from."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from pdserve.engine.engine import Engine
from pdserve.engine.events import EngineEvent, HandedBackSeq, RowDied, Sampled, StepDied
from pdserve.engine.fake_rule import EOS_ID, FakeRule
from pdserve.engine.fake_runner import FakeFaults, FakeRunner
from pdserve.engine.scheduler import EngineLimits
from pdserve.engine.sequence import Sequence, SequenceState
from pdserve.sampling import SampleKey, SamplingParams
from tests.support.virtual_clock import VirtualClock


def sample_key(
    max_tokens: int = 8, *, seed: int = 7, choice: int = 0, params: SamplingParams | None = None
) -> SampleKey:
    return SampleKey(
        params=params or SamplingParams(),
        seed=seed,
        choice=choice,
        eos_token_ids=(EOS_ID,),
        max_tokens=max_tokens,
    )


def sequence(
    prompt_ids: Seq[int],
    max_tokens: int = 8,
    *,
    handle: int = 1,
    strikes: int = 0,
    key: SampleKey | None = None,
) -> Sequence:
    return Sequence(
        handle=handle,
        session_id=1,
        ids=list(prompt_ids),
        num_prompt_tokens=len(prompt_ids),
        key=key or sample_key(max_tokens, seed=handle),
        num_strikes=strikes,
    )


def engine(
    num_blocks: int = 64,
    *,
    block_size: int = 4,
    faults: FakeFaults | None = None,
    rule: FakeRule | None = None,
    limits: EngineLimits | None = None,
    clock: VirtualClock | None = None,
) -> Engine:
    runner = FakeRunner(num_blocks=num_blocks, block_size=block_size, faults=faults, rule=rule)
    return Engine(runner, limits or EngineLimits(), clock or VirtualClock())


def start_local(target: Engine, seq: Sequence) -> Sequence:
    """Prefill and decode here."""
    assert target.reserve_prefill(seq, then_decode=True)
    target.start_prefill(seq, then_decode=True)
    return seq


def step(target: Engine) -> list[EngineEvent]:
    """One step, after which those that it ended have given their blocks back."""
    events = target.step()
    for event in events:
        if isinstance(event, RowDied | HandedBackSeq) or (isinstance(event, Sampled) and event.finish):
            target.end(event.seq)
        elif isinstance(event, StepDied):
            for seq in event.seqs:
                target.end(seq)
    assert target.pool.adds_up()
    return events


def run_out(target: Engine, *, max_events: int = 10_000) -> list[EngineEvent]:
    """Step until nothing can run."""
    events: list[EngineEvent] = []
    while target.has_work:
        new = step(target)
        assert new, "has_work was a lie"
        events += new
        assert len(events) < max_events, "it doesn't terminate"
    return events


def assert_at_rest(target: Engine) -> None:
    """No block is in use."""
    counts = target.pool.counts()
    assert target.pool.adds_up()
    assert (counts.granted, counts.owned, counts.quarantined) == (0, 0, 0)
    assert not target.has_work


def state_of(seq: Sequence) -> SequenceState:
    """Its state now: a call, as a type checker takes an attribute for what it was when last looked at."""
    return seq.state


def can_run(target: Engine) -> bool:
    """has_work, likewise as a call."""
    return target.has_work


def generated(seq: Sequence) -> list[int]:
    return seq.ids[seq.num_prompt_tokens :]


def fill(target: Engine, lengths: dict[int, int], max_tokens: int) -> list[Sequence]:
    """Sequences of these prompt lengths, by handle, to be prefilled here."""
    prompts = {handle: [handle] * length for handle, length in lengths.items()}
    return [start_local(target, sequence(prompt, max_tokens, handle=h)) for h, prompt in prompts.items()]
