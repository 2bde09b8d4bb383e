"""Demanded calls: what the grammar lets through, the parser understands, whatever the functions are."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import jsonschema
import pytest

from http_door.tools.forced import MAX_CALLS, forced_calls, forced_parser, form_of
from http_door.tools.formats import FORMATS
from http_door.tools.port import Arguments, OutputParser
from pdserve.errors import InvalidRequest
from pdserve.grammar.compiler import compile_structure
from pdserve.grammar.vocabulary import GrammarVocabulary
from pdserve.token_matcher import TokenMatcher
from tests.unit.http_door.taking_apart import Apart, apart

FUNCTIONS: dict[str, dict[str, Any]] = {
    "get": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 5}},
        "required": ["city"],
    },
    "get_all": {},
    "add-2.b": {
        "type": "object",
        "properties": {"n": {"$ref": "#/$defs/n"}},
        "required": ["n"],
        "$defs": {"n": {"type": "integer", "minimum": 3, "maximum": 5}},
    },
}
VOCABULARY = GrammarVocabulary.of_bytes()


def allowed_by(matcher: TokenMatcher) -> list[int]:
    """The bytes that may follow, and the end."""
    mask = matcher.mask()
    return [value for value in range(257) if mask[value // 32] >> value % 32 & 1]


def drawn(name: str, rng: Random, *, is_one: bool) -> str:
    """A text of the grammar, drawn byte by byte; it ends where it may."""
    matcher = compile_structure(forced_calls(form_of(name), FUNCTIONS, is_one=is_one), VOCABULARY).matcher(
        (VOCABULARY.end_id,)
    )
    text = bytearray()
    while True:
        allowed = allowed_by(matcher)
        if VOCABULARY.end_id in allowed and (rng.random() < 0.5 or len(allowed) == 1):
            return text.decode()
        usual = [value for value in allowed if value in b' "{}[]:,0123456789abcdefghij\\<'] or allowed
        text.append(rng.choice([value for value in usual if value != VOCABULARY.end_id]))
        matcher.take(text[-1])


@pytest.mark.parametrize("name", [*sorted(FORMATS), ""])
def test_what_the_grammar_lets_through_is_calls(name: str) -> None:
    rng = Random(5)
    seen = set()
    for is_one in (True, False, False, False):
        text = drawn(name, rng, is_one=is_one)

        def make() -> OutputParser:
            return forced_parser(form_of(name), FORMATS[name or "hermes"], tuple(FUNCTIONS), Random(1))

        whole = apart(make, [text])
        assert whole.content == whole.reasoning == ""
        assert 1 <= len(whole.calls) <= (1 if is_one else MAX_CALLS)
        for function, told in whole.calls:
            jsonschema.validate(json.loads(told), FUNCTIONS[function])
            seen.add(function)
        assert apart(make, text) == whole
        for cut in range(0, len(text), 7):
            assert apart(make, [text[:cut], text[cut:]]) == whole
    assert seen


def test_arguments_come_as_they_are_written() -> None:
    parser = forced_parser(form_of("hermes"), FORMATS["hermes"], ("f",), Random(1))
    assert parser.feed('<tool_call>\n{"name": "f", "argu') == []
    assert [type(part).__name__ for part in parser.feed("ments: ".replace("ments", 'ments"'))] == [
        "CallBegun"
    ]
    assert parser.feed('{"city": "Pa') == [Arguments(0, '{"city": "Pa')]
    assert parser.feed('ris"}') == [Arguments(0, 'ris"}')]
    assert parser.feed("}\n</tool_call>") == parser.finish() == []


def test_a_call_that_was_cut_off_stays_so() -> None:
    def make() -> OutputParser:
        return forced_parser(form_of("mistral"), FORMATS["mistral"], ("f",), Random(1))

    assert apart(make, '[{"name": "f", "arguments": {"city": "Pa').calls == (("f", '{"city": "Pa'),)
    assert apart(make, '[{"na') == Apart("", "", ())
    assert apart(make, '[{"name": "f", "arguments": {}}, {"n') == Apart("", "", (("f", "{}"),))


def test_no_more_than_what_a_function_names() -> None:
    grammar = forced_calls(form_of(""), {"f": {"properties": {"n": {"type": "integer"}}}}, is_one=True)
    matcher = compile_structure(grammar, VOCABULARY).matcher((VOCABULARY.end_id,))
    for byte in b'[{"name": "f", "arguments": {"':
        matcher.take(byte)
    assert allowed_by(matcher) == [ord("n")]


def test_a_schema_that_can_not_be_is_refused() -> None:
    grammar = forced_calls(form_of("hermes"), {"f": {"properties": {"n": {"type": "none"}}}}, is_one=True)
    with pytest.raises(InvalidRequest, match="grammar can't be used"):
        compile_structure(grammar, VOCABULARY)
