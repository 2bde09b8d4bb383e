"""Structure → something that gives matchers, within limits on size and time; errors name the place."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from llguidance import LLMatcher, LLParserLimits

from pdserve.clock import thread_cpu_s
from pdserve.errors import InvalidRequest, RowFailed
from pdserve.grammar.error_position import (
    grammar_place,
    pattern_error,
    regex_error,
    schema_place,
    without_place,
)
from pdserve.grammar.lark import is_gbnf, read_schema, schema_to_lark, to_lark
from pdserve.grammar.matcher import CompiledStructure
from pdserve.grammar.vocabulary import GrammarVocabulary
from pdserve.structure import Structure, StructureKind

# The library counts its own steps, so that these cut at the same place on every machine. The first two bound usual
# compiling to about a second for 64 KiB of schema, but not all of it: a step may be as large as a grammar makes it, so
# compiling happens in a child process first (pdserve/children). The others bound each mask; a row of an ambiguous
# grammar costs time in the cube of its items, which are four for each optional property that may come next.
_LIMITS = LLParserLimits(
    max_grammar_size=500_000,
    initial_lexer_fuel=1_000_000,
    max_items_in_row=1_300,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=100_000,
    verbose_errors=False,
)
_COERCE = "Enable 'coerce_one_of'"
_NOTHING = "NoExtension"
_SCHEMA_ERROR = "failed to compile JSON schema: "


def compile_structure(
    structure: Structure, vocabulary: GrammarVocabulary, cpu_s: Callable[[], float] = thread_cpu_s
) -> CompiledStructure:
    """Compile, and try the first mask. Any thread; the interpreter is free meanwhile.

    cpu_s  what the calling thread has computed, which bounds what each token may take
    Raises InvalidRequest: what is wrong and where (JSON pointer, offset, or line and column), which limit it passes,
    or that no text satisfies it.
    """
    matcher = _matcher(to_lark(structure), vocabulary)
    if matcher.is_error():
        raise _error(structure, matcher.get_error(), vocabulary)
    compiled = CompiledStructure(matcher, vocabulary, cpu_s)
    try:
        first = compiled.matcher((vocabulary.end_id,)).mask()
    except RowFailed as error:
        why = str(error.fields["why"])
        if why.startswith(_NOTHING):
            raise InvalidRequest(f"no text satisfies {structure.kind.value}") from None
        raise InvalidRequest(f"{structure.kind.value} is too complex", why=why) from None
    if not first.any():
        raise InvalidRequest(f"no text satisfies {structure.kind.value}")
    return compiled


def _matcher(lark: str, vocabulary: GrammarVocabulary) -> LLMatcher:
    grammar = json.dumps({"grammars": [{"lark_grammar": lark}]})
    return LLMatcher(vocabulary.tokens, grammar, log_level=0, limits=_LIMITS)


def _error(structure: Structure, message: str, vocabulary: GrammarVocabulary) -> InvalidRequest:
    kind = structure.kind
    sentence = f"{kind.value} can't be used"
    if kind is StructureKind.JSON_SCHEMA:
        return _schema_error(read_schema(structure.text), vocabulary)
    if kind is StructureKind.REGEX:
        why, place = regex_error(message, structure.text)
        return InvalidRequest(sentence, why=why, **place)
    if kind is StructureKind.GRAMMAR and not is_gbnf(structure.text):
        return InvalidRequest(sentence, why=without_place(message), **grammar_place(message))
    return InvalidRequest(sentence, why=without_place(message))


def _schema_error(schema: dict[str, Any], vocabulary: GrammarVocabulary) -> InvalidRequest:
    def error_of(part: dict[str, Any]) -> str:
        matcher = _matcher(schema_to_lark(part), vocabulary)
        return _without_frame(matcher.get_error()) if matcher.is_error() else ""

    message = error_of(schema)
    place = schema_place(schema, message, error_of)
    why = pattern_error(message) or message.split("\n", 1)[0]
    if _COERCE in why:
        why = "oneOf is supported only where its parts can be told apart by a constant; anyOf takes any"
    return InvalidRequest("json_schema can't be used", why=why, place=place)


def _without_frame(message: str) -> str:
    """The library's words on a schema, without the lines of the grammar around it, which it shows at the end."""
    inner = message.partition(_SCHEMA_ERROR)[2] or without_place(message)
    return inner.split("\n   1 | ", 1)[0]
