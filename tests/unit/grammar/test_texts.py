"""Random texts of structures are what they should be, and end where nothing may follow."""

from __future__ import annotations

import random

import pytest

from pdserve.errors import RowFailed
from pdserve.grammar.cache import StructureCache
from pdserve.grammar.compiler import compile_structure
from pdserve.grammar.vocabulary import GrammarVocabulary
from pdserve.structure import Structure
from pdserve.token_mask import ids_of
from pdserve.tokenizer import Tokenizer
from tests.support.structures import WISHES, Wish

TOKENIZER = Tokenizer.fake()
VOCABULARY = GrammarVocabulary(TOKENIZER)
TOKENS = TOKENIZER.token_bytes()
BLANKS = frozenset(b" \t\r\n")
EOS = 256
SEEDS = 20


def random_text(structure: Structure, source: random.Random, most_tokens: int) -> tuple[bytes, bool]:
    """Any text of it, and whether nothing may follow it; blanks are rare, so that it ends."""
    matcher = compile_structure(structure, VOCABULARY).matcher((EOS,))
    text = b""
    for _ in range(most_tokens):
        allowed = ids_of(matcher.mask())
        assert allowed, text
        words = [each for each in allowed if each not in BLANKS] if source.random() < 0.9 else allowed
        token_id = source.choice(words or allowed)
        if token_id == EOS:
            return text, False
        matcher.take(token_id)
        text += TOKENS[token_id]
        if matcher.is_complete:
            return text, True
        assert ids_of(matcher.mask()) != [EOS], f"{text!r} is complete"
    raise AssertionError(f"no end: {text!r}")


@pytest.mark.parametrize("wish", WISHES, ids=str)
def test_random_texts(wish: Wish) -> None:
    texts = {random_text(wish.structure, random.Random(seed), wish.max_tokens)[0] for seed in range(SEEDS)}
    assert len(texts) > 1
    for text in texts:
        assert wish.is_right(text.decode()), text


def test_a_schemas_keys_come_in_its_order_and_others_only_if_it_says_so() -> None:
    closed = {"properties": {"b": {"const": 1}, "a": {"const": 2}}, "required": ["a", "b"], "type": "object"}
    matcher = compile_structure(
        Structure.json_schema({**closed, "additionalProperties": False}), VOCABULARY
    ).matcher(())
    for token_id in b'{"b":1,"a":2}':
        matcher.take(token_id)
    assert matcher.is_complete
    open_one = compile_structure(Structure.json_schema(closed), VOCABULARY)
    assert open_one.matcher((), b'{"b":1,"a":2,"c":[]}').is_complete
    with pytest.raises(RowFailed, match="a token that the structure doesn't allow"):
        open_one.matcher((), b'{"a"')


def test_blanks_between_json_tokens_are_bounded() -> None:
    compiled = compile_structure(Structure.json_object(), VOCABULARY)
    compiled.matcher((), b"{" + b" " * 32 + b'"')
    with pytest.raises(RowFailed):
        compiled.matcher((), b"{" + b" " * 33)
    with pytest.raises(RowFailed):
        compiled.matcher((), b" {")


def test_a_whole_text_without_ends_allows_what_goes_on() -> None:
    matcher = compile_structure(Structure.regex("ab?"), VOCABULARY).matcher(())
    matcher.take(ord("a"))
    assert not matcher.is_complete
    assert ids_of(matcher.mask()) == [ord("b")]


def test_an_end_that_is_text_too_is_allowed_only_behind_a_whole_text() -> None:
    newline, b = ord("\n"), ord("b")
    matcher = compile_structure(Structure.regex("a[\\nb]c"), VOCABULARY).matcher((newline,), b"a")
    assert ids_of(matcher.mask()) == [b]
    matcher = compile_structure(Structure.regex("a[\\nb]*"), VOCABULARY).matcher((newline,), b"a")
    assert ids_of(matcher.mask()) == [newline, b]


def test_special_tokens_are_no_text() -> None:
    matcher = compile_structure(Structure.regex("(?s:.)*"), VOCABULARY).matcher(())
    allowed = ids_of(matcher.mask())
    assert EOS not in allowed
    # One byte each; those that begin no character are not among them. 257 to 259 read <257> and so on.
    assert {*range(128), *range(0xC2, 0xF5), 257, 258, 259} == set(allowed)


def test_the_cache_forgets_the_oldest() -> None:
    cache: StructureCache[int] = StructureCache(most_entries=2, most_bytes=100)
    first, second, third = (Structure.regex(text) for text in ("a", "b", "c"))
    cache.put(first, 1)
    cache.put(second, 2)
    assert cache.get(first) == 1
    cache.put(third, 3)
    assert (cache.get(first), cache.get(second), cache.get(third)) == (1, None, 3)
    cache.put(Structure.regex("d" * 99), 4)
    assert (len(cache), cache.get(third)) == (2, 3)
    cache.put(Structure.regex("e" * 200), 5)
    assert (len(cache), cache.get(Structure.regex("e" * 200))) == (1, 5)
