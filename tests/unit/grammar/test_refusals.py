"""What can't be compiled is refused, with the place or the limit."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from pdserve.clock import SystemClock
from pdserve.errors import InvalidRequest, RowFailed
from pdserve.grammar.compiler import compile_structure
from pdserve.grammar.vocabulary import GrammarVocabulary
from pdserve.structure import Structure
from pdserve.tokenizer import Tokenizer

VOCABULARY = GrammarVocabulary(Tokenizer.fake())


def schema(content: dict[str, Any]) -> Structure:
    return Structure.json_schema(content)


def deep(levels: int) -> dict[str, Any]:
    inner: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        inner = {"type": "array", "items": inner}
    return inner


def next_or_list_of_it(number: int) -> dict[str, Any]:
    reference = {"$ref": f"#/$defs/d{number + 1}"}
    return {"anyOf": [reference, {"type": "array", "items": reference}]}


MANY_WAYS = {
    "allOf": [
        {"anyOf": [{"properties": {f"a{n}": {"const": 1}}}, {"properties": {f"b{n}": {"const": 1}}}]}
        for n in range(14)
    ]
}
TWO_STRINGS = {"oneOf": [{"type": "string"}, {"type": "string", "minLength": 3}]}

CASES: list[tuple[Structure, str]] = [
    (Structure.regex("a(b"), "regex can't be used (why=unclosed group, offset=1)"),
    (Structure.regex("a/b/("), "regex can't be used (why=unclosed group, offset=4)"),
    (Structure.regex("\\\\/a\\/("), "regex can't be used (why=unclosed group, offset=6)"),
    (Structure.regex("x\n(b"), "regex can't be used (why=unclosed group, line=2, column=1)"),
    (Structure.regex("[z-a]"), "the start must be <= the end, offset=1)"),
    (Structure.regex("(?=a)b"), "look-behind, is not supported, offset=0)"),
    (Structure.regex("\\bfoo"), "regex can't be used (why=lookarounds not supported yet"),
    (Structure.regex("ab\\"), "regex can't be used (why=nothing follows the backslash, offset=2)"),
    (Structure.regex("[^\\s\\S]"), "no text satisfies regex"),
    (Structure.json_schema('{\n "type":'), "json_schema is not JSON (why=Expecting value, line=2, column=9)"),
    (Structure.json_schema('{"const": NaN}'), "json_schema is not JSON (why=NaN is not JSON)"),
    (Structure.json_schema("[1]"), "json_schema must be a JSON object (place=#, got=list)"),
    (schema({"x-guidance": {}}), "json_schema can't set the library's options (place=#/x-guidance)"),
    (
        schema({"properties": {"a": {"type": "strin"}}}),
        "json_schema can't be used (why=Invalid type: strin, place=#/properties/a)",
    ),
    (
        schema({"properties": {"a/b": {"items": {"anyOf": [{"type": "null"}, {"type": "string", "pattern": "a(b"}]}}}}),
        "json_schema can't be used (why=unclosed group, place=#/properties/a~1b/items/anyOf/1)",
    ),
    (
        schema({"$defs": {"A": {"properties": {"x": {"type": "bogus"}}}}, "$ref": "#/$defs/A"}),
        "(why=Invalid type: bogus, place=#/$defs/A/properties/x)",
    ),
    (schema({"$ref": "#/x"}), "(why=Pointer '/x' does not exist, place=#)"),
    (
        schema({"properties": {"q": {"not": {"type": "string"}}}}),
        '(why=Unimplemented keys: ["not"], place=#/properties/q)',
    ),
    (
        schema({"type": "string", "minLength": 5, "maxLength": 2}),
        "(why=Unsatisfiable schema: minLength (5) is greater than maxLength (2), place=#)",
    ),
    (schema({"items": TWO_STRINGS}), "told apart by a constant; anyOf takes any, place=#/items)"),
    (schema(deep(500)), "recursion limit exceeded"),
    (schema(MANY_WAYS), "json_schema can't be used (why=schema too large, place=#)"),
    (Structure.grammar('start: "a" | b'), 'grammar can\'t be used (why=unknown name: "b", line=1, column=8)'),
    (Structure.grammar('start: "a"\nfoo "b"'), "line=2, column=5)"),
    (
        Structure.grammar("start: X\nX: /[/"),
        'grammar can\'t be used (why=invalid regex "[": unclosed character class, line=2, column=4)',
    ),
    (
        Structure.grammar('start: %json {"type": "strin"}'),
        "(why=failed to compile JSON schema: Invalid type: strin, line=1, column=8)",
    ),
    (Structure.grammar('foo: "a"'), "grammar can't be used (why=no start rule found)"),
    (Structure.grammar('start: a\na: a "x"'), "no text satisfies grammar"),
]  # fmt: skip


@pytest.mark.parametrize(("structure", "said"), CASES, ids=[f"{n}" for n in range(len(CASES))])
def test_is_refused_with_the_place(structure: Structure, said: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(said)):
        compile_structure(structure, VOCABULARY)


BOMBS = {
    "repetitions of repetitions": Structure.regex("((a|b|ab|ba){1,300}c?){1,300}"),
    "a state for each of 2^22 pasts": Structure.regex("(a|b)*a(a|b){22}"),
    "ambiguous": Structure.grammar('start: a+\na: "a" | "aa" | a a'),
    "as many fields as fit": schema({"properties": {f"p{n}": {"type": "string"} for n in range(1800)}}),
    "many alternatives": Structure.json_schema(json.dumps({"enum": [f"{n}" for n in range(6000)]})),
    "nested references": schema(
        {
            "$defs": {**{f"d{n}": next_or_list_of_it(n) for n in range(25)}, "d25": {"type": "integer"}},
            "$ref": "#/$defs/d0",
        }
    ),
}  # fmt: skip


@pytest.mark.parametrize("structure", BOMBS.values(), ids=BOMBS)
def test_what_blows_up_is_cut(structure: Structure) -> None:
    """Compiled or refused, followed or given up: by the library's own counts, so always at the same place."""
    clock = SystemClock()
    begun_s = clock.now_s()
    try:
        matcher = compile_structure(structure, VOCABULARY).matcher((256,))
        for _ in range(200):
            mask = matcher.mask()
            allowed = [each for each in range(256) if int(mask[each // 32]) >> each % 32 & 1]
            if not allowed:
                break
            matcher.take(allowed[0])
            if matcher.is_complete:
                break
        outcome = "followed"
    except (InvalidRequest, RowFailed) as error:
        outcome = str(error)
    print(f"{clock.now_s() - begun_s:.3f} s: {outcome}")


def test_errors_show_nothing_of_the_librarys_state() -> None:
    compiled = compile_structure(Structure.regex("((a|b|ab|ba){1,300}c?){1,300}"), VOCABULARY)
    matcher = compiled.matcher(())
    with pytest.raises(RowFailed) as raised:
        for _ in range(2000):
            mask = matcher.mask()
            matcher.take(97 if int(mask[3]) >> 1 & 1 else 98)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 300
