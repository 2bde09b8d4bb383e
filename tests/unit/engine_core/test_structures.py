"""Sequences whose text must have a structure, in the engine: masks, ends, preemption, and what dies."""

from __future__ import annotations

from dataclasses import replace

from pdserve.engine import fake_rule
from pdserve.engine.events import Preempted, RowDied, Sampled
from pdserve.engine.fake_rule import EOS_ID, FakeRule
from pdserve.engine.scheduler import EngineLimits
from pdserve.engine.sequence import Sequence
from pdserve.errors import RowFailed
from pdserve.sampling import FinishReason, SamplingParams, end_token_ids
from pdserve.structure import Structure
from pdserve.token_mask import TokenMask
from tests.support.list_matcher import ListMatcher
from tests.unit.engine_core.building import (
    assert_at_rest,
    engine,
    generated,
    run_out,
    sample_key,
    start_local,
    step,
)

PROMPT = list(b"the quick brown fox")
TOKENS = [bytes([byte]) for byte in range(256)]


def structured(
    texts: list[str], *, handle: int = 1, max_tokens: int = 40, **fields: object
) -> tuple[Sequence, ListMatcher]:
    params = SamplingParams(structure=Structure.choices(texts))
    key = sample_key(max_tokens, seed=handle, params=replace(params, **fields))  # type: ignore[arg-type]
    encoded = [text.encode() for text in texts]

    def matcher() -> ListMatcher:
        return ListMatcher(encoded, TOKENS, end_token_ids(key))

    seq = Sequence(
        handle=handle,
        session_id=1,
        ids=list(PROMPT),
        num_prompt_tokens=len(PROMPT),
        key=key,
        matcher=matcher(),
    )
    return seq, matcher()


def test_the_text_is_one_of_them_and_ends_where_nothing_may_follow() -> None:
    target = engine()
    texts = ["hello", "help", "hold it", "x"]
    for handle in range(1, 9):
        seq, oracle = structured(texts, handle=handle)
        start_local(target, seq)
        (*_, last) = run_out(target)
        assert isinstance(last, Sampled) and last.finish is FinishReason.STRUCTURE
        assert bytes(generated(seq)).decode() in texts
        assert generated(seq) == fake_rule.expected_choice(PROMPT, seq.key, matcher=oracle)
    assert_at_rest(target)


def test_the_first_token_is_masked_too() -> None:
    target = engine()
    seq, _ = structured(["q", "z"])
    assert target.reserve_prefill(seq)
    target.start_prefill(seq, then_decode=False)
    (*_, last) = run_out(target)
    assert isinstance(last, Sampled) and last.first and last.finish is FinishReason.STRUCTURE
    assert generated(seq) in ([ord("q")], [ord("z")])


def test_a_text_that_could_go_on_ends_by_its_end_token() -> None:
    target = engine(rule=FakeRule(eos_one_in=1))
    seq, _ = structured(["ab", "abc"])
    start_local(target, seq)
    (*_, last) = run_out(target)
    assert isinstance(last, Sampled) and last.finish is FinishReason.EOS
    assert generated(seq) == [*b"ab", EOS_ID]
    going_on, _ = structured(["ab", "abc"], handle=2, ignore_eos=True)
    start_local(target, going_on)
    (*_, last) = run_out(target)
    assert isinstance(last, Sampled) and last.finish is FinishReason.STRUCTURE
    assert generated(going_on) == [*b"abc"]


def test_a_whole_text_ends_before_min_tokens_and_is_said_rather_than_length() -> None:
    target = engine()
    for fields in ({"min_tokens": 9}, {"max_tokens": 2}):
        seq, _ = structured(["ab"], **fields)
        start_local(target, seq)
        (*_, last) = run_out(target)
        assert isinstance(last, Sampled) and last.finish is FinishReason.STRUCTURE
    cut, _ = structured(["abc"], max_tokens=2)
    start_local(target, cut)
    (*_, last) = run_out(target)
    assert isinstance(last, Sampled) and last.finish is FinishReason.LENGTH


def test_preempted_ones_go_on_where_they_were() -> None:
    texts = ["".join(chr(97 + (start + n) % 26) for n in range(30)) for start in range(4)]
    target = engine(num_blocks=16, limits=EngineLimits(max_batch=4, prefix_cache=False))
    seqs = [structured(texts, handle=handle) for handle in range(1, 4)]
    for seq, _ in seqs:
        start_local(target, seq)
    events = run_out(target)
    assert any(isinstance(event, Preempted) for event in events)
    for seq, oracle in seqs:
        assert generated(seq) == fake_rule.expected_choice(PROMPT, seq.key, matcher=oracle)
        assert bytes(generated(seq)).decode() in texts
    assert_at_rest(target)


def test_where_nothing_is_left_that_sequence_dies_alone_and_says_why() -> None:
    target = engine()
    seq, _ = structured(["abc"], banned_token_ids=(ord("c"),))
    other, _ = structured(["hello"], handle=2)
    start_local(target, seq)
    start_local(target, other)
    events = run_out(target)
    (died,) = [event for event in events if isinstance(event, RowDied)]
    assert died.seq is seq
    assert "what choices allows here, the request's other settings or the vocabulary rule out" in str(
        died.error
    )
    assert generated(other) == [*b"hello"]
    assert_at_rest(target)


def test_a_matcher_that_gives_up_kills_its_sequence_only() -> None:
    target = engine()
    seq, _ = structured(["abc"])
    other, _ = structured(["hello"], handle=2)
    seq.matcher = GivesUp([b"abc"], TOKENS, ())
    start_local(target, seq)
    start_local(target, other)
    events = [*step(target), *run_out(target)]
    (died,) = [event for event in events if isinstance(event, RowDied)]
    assert died.seq is seq and "too complex" in str(died.error)
    assert generated(seq) == [ord("a")]
    assert generated(other) == [*b"hello"]
    assert_at_rest(target)


class GivesUp(ListMatcher):
    """As a library whose limits are passed behind the first token."""

    def mask(self) -> TokenMask:
        if self.text:
            raise RowFailed("the structure became too complex during generation")
        return super().mask()
