"""A token may follow if and only if its bytes can: the library's masks against brute force, along random texts."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.errors import RowFailed
from pdserve.grammar.compiler import compile_structure
from pdserve.grammar.matcher import CompiledStructure, GrammarMatcher
from pdserve.grammar.vocabulary import GrammarVocabulary
from pdserve.structure import Structure
from pdserve.token_mask import ids_of
from tests.support.byte_tokens import byte_vocabulary
from tests.support.list_matcher import ListMatcher
from tests.support.regex_oracle import (
    Bytes,
    Empty,
    Many,
    Nothing,
    Regex,
    behind,
    behind_all,
    both,
    either,
    goes_on,
    is_whole,
)

ALPHABET = b"abc"
TOKENS = (
    b"a",
    b"b",
    b"c",
    b"ab",
    b"abc",
    b"ba",
    b"bb",
    b"ca",
    b"cab",
    b"aa",
    b"aab",
    b"acb",
    b"\xc3",
    b"\xa9",
    b"\xc3\xa9a",
)
VOCABULARY: GrammarVocabulary = byte_vocabulary(TOKENS)
EOS, STOP = len(TOKENS), 300  # a model may have more ids than its tokenizer
ENDS = (EOS, STOP)
MOST_TOKENS = 12

regexes: st.SearchStrategy[Regex] = st.recursive(
    st.builds(Bytes, st.frozensets(st.sampled_from(ALPHABET), min_size=1)),
    lambda inner: st.one_of(
        st.builds(both, inner, inner), st.builds(either, inner, inner), st.builds(Many, inner)
    ),
    max_leaves=8,
)
texts = st.lists(st.text("abc\u00e9", min_size=1, max_size=6), min_size=1, max_size=6, unique=True)
sources = st.integers(0, 1 << 32).map(random.Random)


def walk(
    compiled: CompiledStructure,
    source: random.Random,
    allowed: Callable[[bytes], tuple[list[int], bool, bool]],
) -> None:
    """Follow a random text; `allowed` gives, behind a text: ids that may follow, may it end, can nothing follow."""
    matcher, unmasked = compiled.matcher(ENDS), compiled.matcher(ENDS)
    taken: list[int] = []
    text = b""
    for _ in range(MOST_TOKENS):
        may_follow, may_end, is_complete = allowed(text)
        if taken:
            assert matcher.is_complete is unmasked.is_complete is is_complete, text
        if is_complete and taken:
            return
        assert ids_of(matcher.mask()) == [*may_follow, *(ENDS if may_end else ())], text
        again = compiled.matcher(ENDS, taken)
        assert ids_of(again.mask()) == ids_of(matcher.mask())
        refused(again, [each for each in range(len(TOKENS)) if each not in may_follow], source)
        if not may_follow:
            return
        token_id = source.choice(may_follow)
        text += TOKENS[token_id]
        taken.append(token_id)
        matcher.take(token_id)
        unmasked.take(token_id)


def refused(matcher: GrammarMatcher, token_ids: list[int], source: random.Random) -> None:
    if token_ids:
        with pytest.raises(RowFailed):
            matcher.take(source.choice(token_ids))


@settings(deadline=None, max_examples=150)
@given(regexes, sources)
def test_regexes(regex: Regex, source: random.Random) -> None:
    def allowed(text: bytes) -> tuple[list[int], bool, bool]:
        here = behind_all(regex, text)
        may_follow = [
            token_id
            for token_id, token in enumerate(TOKENS)
            if not isinstance(behind_all(here, token), Nothing)
        ]
        return may_follow, is_whole(here), is_whole(here) and not goes_on(here, ALPHABET)

    walk(compile_structure(Structure.regex(str(regex)), VOCABULARY), source, allowed)


@settings(deadline=None, max_examples=150)
@given(texts, sources)
def test_choices(members: list[str], source: random.Random) -> None:
    encoded = [text.encode() for text in members]

    def allowed(text: bytes) -> tuple[list[int], bool, bool]:
        oracle = ListMatcher(encoded, TOKENS, ENDS)
        oracle.text = text
        return oracle.allowed, text in encoded, oracle.is_complete

    walk(compile_structure(Structure.choices(members), VOCABULARY), source, allowed)


def test_the_oracle_itself() -> None:
    regex = both(
        Bytes(frozenset(b"a")), Many(either(Bytes(frozenset(b"b")), both(Empty(), Bytes(frozenset(b"c")))))
    )
    assert str(regex) == "[a](?:(?:[b]|[c]))*"
    assert [is_whole(behind_all(regex, text)) for text in (b"", b"a", b"abcb", b"ba", b"aa")] == [
        False, True, True, False, False,
    ]  # fmt: skip


@settings(deadline=None, max_examples=150)
@given(regexes)
def test_a_regex_has_few_derivatives(regex: Regex) -> None:
    """Without that, some regexes take the oracle minutes."""
    seen, ahead = {regex}, [regex]
    while ahead:
        here = ahead.pop()
        for byte in ALPHABET:
            there = behind(here, byte)
            if there not in seen:
                seen.add(there)
                ahead.append(there)
        assert len(seen) <= 1000
