"""Rows to sample: logits with ties, ids with repeats, any settings together."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

from pdserve.sampling import SampleKey, SamplingParams


@dataclass(frozen=True, slots=True)
class Case:
    """One row. mask: the ids that a grammar allows, or None."""

    logits: tuple[float, ...]
    key: SampleKey
    ids: tuple[int, ...]
    num_prompt: int
    mask: frozenset[int] | None


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Few tokens, so that settings meet."""
    size = draw(st.integers(2, 14))
    token = st.integers(0, size - 1)
    tokens = st.lists(token, max_size=3, unique=True).map(tuple)
    ids = draw(st.lists(token, min_size=1, max_size=8).map(tuple))
    params = SamplingParams(
        temperature=draw(st.sampled_from([0.25, 0.7, 1.0, 1.9])),
        top_k=draw(st.sampled_from([0, 0, 1, 2, 5, 20])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.07, 0.5, 0.9, 0.999])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.013, 0.3, 1.0])),
        typical_p=draw(st.sampled_from([1.0, 1.0, 0.11, 0.6, 0.97])),
        repetition_penalty=draw(st.sampled_from([1.0, 0.5, 1.3])),
        presence_penalty=draw(st.sampled_from([0.0, -1.1, 0.7])),
        frequency_penalty=draw(st.sampled_from([0.0, -0.4, 0.9])),
        logit_bias=tuple(
            sorted(draw(st.dictionaries(token, st.sampled_from([-100.0, -1.5, 2.0]), max_size=3)).items())
        ),
        allowed_token_ids=draw(st.just(()) | st.lists(token, min_size=1, max_size=6, unique=True).map(tuple)),
        banned_token_ids=draw(tokens),
        min_tokens=draw(st.integers(0, 4)),
        stop_token_ids=draw(tokens),
        ignore_eos=draw(st.booleans()),
    )
    key = SampleKey(
        params=params,
        seed=draw(st.integers(0, 2**64 - 1)),
        choice=draw(st.integers(0, 3)),
        eos_token_ids=draw(tokens),
        max_tokens=100,
        bad_word_ids=draw(
            st.lists(st.lists(token, min_size=1, max_size=3).map(tuple), max_size=3).map(tuple)
        ),
    )
    return Case(
        logits=tuple(
            value / 8 for value in draw(st.lists(st.integers(-40, 40), min_size=size, max_size=size))
        ),
        key=key,
        ids=ids,
        num_prompt=draw(st.integers(1, len(ids))),
        mask=draw(st.none() | st.frozensets(token, min_size=1)),
    )
