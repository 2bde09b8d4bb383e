"""Prompt logprobs out of the engine: each once, whatever the chunks; and what rows cost in joules."""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Seq
from dataclasses import replace

import pytest

from pdserve.engine.engine import Engine
from pdserve.engine.events import ChunkDone, EngineEvent, Preempted, PromptScored, Sampled
from pdserve.engine.fake_rule import expected_choice, expected_prompt_logprobs
from pdserve.engine.fake_runner import FakeRunner
from pdserve.engine.port import Row, RowOutput, SampleSpec, ScoreSpec
from pdserve.engine.scheduler import EngineLimits
from pdserve.engine.sequence import Sequence
from pdserve.errors import RowFailed
from pdserve.sampling import SamplingParams, TokenLogprobs
from pdserve.token_mask import to_mask
from tests.support.virtual_clock import VirtualClock
from tests.unit.engine_core.building import (
    assert_at_rest,
    engine,
    generated,
    run_out,
    sample_key,
    sequence,
    start_local,
)

PROMPT = list(b"The five boxing wizards jump quickly.")


def scored(events: Seq[EngineEvent], seq: Sequence) -> tuple[TokenLogprobs, ...]:
    """All logprobs of a sequence's prompt, which must follow each other without gap or repeat."""
    found: list[TokenLogprobs] = []
    for event in events:
        if isinstance(event, PromptScored) and event.seq is seq:
            assert event.first == len(found) + 1
            found.extend(event.logprobs)
    return tuple(found)


def asking(prompt: Seq[int] = PROMPT, max_tokens: int = 6, *, handle: int = 1, top: int = 2) -> Sequence:
    key = sample_key(max_tokens, seed=handle, params=SamplingParams(prompt_logprobs=top))
    seq = sequence(prompt, key=key, handle=handle)
    seq.takes_hits = False
    return seq


@pytest.mark.parametrize("chunk", [1, 3, 16, 100])
def test_by_chunk(chunk: int) -> None:
    target = engine(limits=EngineLimits(max_step_tokens=chunk + 1, max_batch=1, chunk_tokens=chunk))
    seq = start_local(target, asking())
    events = run_out(target)
    assert scored(events, seq) == expected_prompt_logprobs(PROMPT, 2)
    assert generated(seq) == expected_choice(PROMPT, seq.key)
    firsts = [index for index, event in enumerate(events) if isinstance(event, PromptScored)]
    assert all(isinstance(events[index + 1], ChunkDone) for index in firsts)
    first_sample = next(index for index, event in enumerate(events) if isinstance(event, Sampled))
    assert firsts[-1] < first_sample


def test_no_hits_are_taken_and_blocks_are_cached_all_the_same() -> None:
    target = engine()
    run_out_one = start_local(target, sequence(PROMPT, handle=1))
    run_out(target)
    seq = start_local(target, asking(handle=2))
    assert (seq.num_computed, seq.num_cached_tokens) == (0, 0)
    events = run_out(target)
    assert scored(events, seq) == expected_prompt_logprobs(PROMPT, 2)
    assert run_out_one.ids[: len(PROMPT)] == seq.ids[: len(PROMPT)]
    later = start_local(target, sequence(PROMPT, handle=3))
    assert later.num_cached_tokens > 0
    run_out(target)
    assert_at_rest(target)


def test_replayed_tokens_are_no_prompt() -> None:
    """An attempt whose ids hold tokens behind the prompt scores the prompt only."""
    target = engine(limits=EngineLimits(max_step_tokens=9, max_batch=1, chunk_tokens=8))
    seq = asking([*PROMPT, *b"more that was sampled before"])
    seq.num_prompt_tokens = len(PROMPT)
    start_local(target, seq)
    assert scored(run_out(target), seq) == expected_prompt_logprobs(PROMPT, 2)


def test_a_prompt_of_one_token_has_none() -> None:
    target = engine()
    seq = start_local(target, asking([65]))
    events = run_out(target)
    assert not [event for event in events if isinstance(event, PromptScored)]
    assert generated(seq) == expected_choice([65], seq.key)


def test_each_once_through_preemption() -> None:
    """Sequences that lose their blocks in mid-prompt, and while they run."""
    limits = EngineLimits(max_step_tokens=8, max_batch=4, chunk_tokens=4, decode_prefill_tokens=4)
    target = engine(num_blocks=20, block_size=4, limits=limits)
    waiting = [asking(PROMPT[: 20 + handle], 30, handle=handle) for handle in range(1, 5)]
    seqs = list(waiting)
    events: list[EngineEvent] = []
    while waiting or target.has_work:
        while waiting and target.reserve_prefill(waiting[0], then_decode=True):
            target.start_prefill(waiting.pop(0), then_decode=True)
        for event in target.step():
            events.append(event)
            if isinstance(event, Sampled) and event.finish is not None:
                target.end(event.seq)
    assert any(isinstance(event, Preempted) for event in events)
    for seq in seqs:
        assert scored(events, seq) == expected_prompt_logprobs(seq.ids[: seq.num_prompt_tokens], 2)
        assert generated(seq) == expected_choice(seq.ids[: seq.num_prompt_tokens], seq.key)
    assert_at_rest(target)


def test_a_runner_scores_what_it_is_asked_for() -> None:
    runner = FakeRunner(num_blocks=8, block_size=8)
    table = [5, 2, 7, 0, 1]
    want = expected_prompt_logprobs(PROMPT, 3)
    (output,) = runner.run([Row(PROMPT[:20], 0, table, None, ScoreSpec(PROMPT[1:21], 0, 3))])
    assert output.scores == want[:20]
    (output,) = runner.run([Row(PROMPT[20:], 20, table, None, ScoreSpec(PROMPT[25:30], 4, 3))])
    assert output.scores == want[24:29]
    (output,) = runner.run([Row(PROMPT[20:], 20, table, None)])
    assert output == RowOutput()


def test_a_mask_rules_out_what_a_grammar_does() -> None:
    runner = FakeRunner(num_blocks=8, block_size=8)
    spec = SampleSpec(sample_key(), PROMPT, len(PROMPT))
    outputs = []
    for mask in (None, to_mask([90, 91], 260), to_mask([200], 260), to_mask([], 260)):
        (output,) = runner.run([Row(PROMPT, 0, [5, 2, 7, 0, 1], replace(spec, mask=mask))])
        outputs.append(output)
    assert outputs[0].token_id == expected_choice(PROMPT, sample_key(1))[0]
    assert [output.token_id for output in outputs[1:3]] == [90, 200]
    assert isinstance(outputs[3].error, RowFailed)


# --- energy


class Costly(FakeRunner):
    """Every row costs a joule a token; the n-th step can't tell."""

    def __init__(self, untold: int = 0) -> None:
        super().__init__(num_blocks=64, block_size=4)
        self._untold = untold
        self._steps = itertools.count(1)

    def run(self, rows: Seq[Row]) -> list[RowOutput]:
        outputs = super().run(rows)
        if next(self._steps) == self._untold:
            return outputs
        return [
            replace(output, energy_j=float(len(row.token_ids)))
            for row, output in zip(rows, outputs, strict=True)
        ]


def test_energy_by_phase() -> None:
    limits = EngineLimits(max_step_tokens=21, max_batch=4, chunk_tokens=20, decode_prefill_tokens=None)
    target = Engine(Costly(), limits, VirtualClock())
    seqs = [start_local(target, sequence(PROMPT, 5, handle=handle)) for handle in (1, 2)]
    run_out(target)
    for seq in seqs:
        computed = len(PROMPT) - seq.num_cached_tokens
        assert (seq.energy.prefill_j, seq.energy.decode_j) == (computed, 4.0)
    assert target.energy.prefill_j == sum(seq.energy.prefill_j or 0 for seq in seqs)
    assert target.energy.decode_j == 8.0


def test_unknown_energy_is_none() -> None:
    target = engine()
    seq = start_local(target, sequence(PROMPT))
    run_out(target)
    assert (seq.energy.prefill_j, seq.energy.decode_j, target.energy.prefill_j) == (None, None, None)
    partly = Engine(Costly(untold=1), EngineLimits(), VirtualClock())
    seq = start_local(partly, sequence(PROMPT, 3))
    run_out(partly)
    assert (seq.energy.prefill_j, seq.energy.decode_j) == (None, 2.0)
