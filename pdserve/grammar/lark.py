"""Structures in the grammar library's own language: every kind becomes one Lark grammar.

`no_forcing`: a token may follow if and only if its bytes can, whatever else would spell the same text.
"""

from __future__ import annotations

import json
from typing import Any

from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

from pdserve.errors import InvalidRequest
from pdserve.grammar.place import gbnf_place
from pdserve.structure import Structure, StructureKind

HEADER = '%llguidance {"no_forcing": true}\n'
MOST_BLANKS = 32  # between two JSON tokens: models that may write blanks without end sometimes do
_JSON_OPTIONS = {"whitespace_pattern": rf"[ \t\n\r]{{0,{MOST_BLANKS}}}"}
_OPTIONS_KEY = "x-guidance"


def to_lark(structure: Structure) -> str:
    """The grammar, HEADER first, with the structure's own text behind `start: ` in its second line.

    Raises InvalidRequest for what can be seen without compiling: JSON that is none, a schema that is no object.
    """
    match structure.kind:
        case StructureKind.JSON_SCHEMA:
            return schema_to_lark(read_schema(structure.text))
        case StructureKind.JSON_OBJECT:
            return schema_to_lark({"type": "object"})
        case StructureKind.REGEX:
            return f"{HEADER}start: /{_escaped(structure.text)}/"
        case StructureKind.CHOICES:
            return f"{HEADER}start: {' | '.join(_quoted(text) for text in structure.texts)}"
        case StructureKind.GRAMMAR:
            return HEADER + _from_grammar(structure.text)


def read_schema(text: str) -> dict[str, Any]:
    """A JSON schema. Raises InvalidRequest naming line and column, or what stands there instead."""
    try:
        schema = json.loads(text, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise InvalidRequest(
            "json_schema is not JSON", why=error.msg, line=error.lineno, column=error.colno
        ) from None
    except (ValueError, RecursionError) as error:
        raise InvalidRequest("json_schema is not JSON", why=str(error)[:200]) from None
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise InvalidRequest("json_schema must be a JSON object", place="#", got=type(schema).__name__)
    if _OPTIONS_KEY in schema:
        raise InvalidRequest("json_schema can't set the library's options", place=f"#/{_OPTIONS_KEY}")
    return schema


def schema_to_lark(schema: dict[str, Any]) -> str:
    """The grammar of a schema."""
    return f"{HEADER}start: %json {json.dumps({**schema, _OPTIONS_KEY: _JSON_OPTIONS})}"


def is_gbnf(text: str) -> bool:
    """Whether a grammar is written in GBNF (llama.cpp's), rather than in Lark."""
    return "::=" in text


def _from_grammar(text: str) -> str:
    if not is_gbnf(text):
        return text
    try:
        return str(any_to_lark(text))
    except GbnfToLarkError as error:
        raise InvalidRequest("grammar can't be used", why=_line(error), **gbnf_place(str(error))) from None
    except (
        Exception
    ) as error:  # the converter raises plain Exception for names that are missing, or given twice
        raise InvalidRequest("grammar can't be used", why=_line(error)) from None


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def _escaped(regex: str) -> str:
    """For between two slashes. Raises InvalidRequest for what would not end there."""
    trailing = len(regex) - len(regex.rstrip("\\"))
    if trailing % 2:
        raise InvalidRequest(
            "regex can't be used", why="nothing follows the backslash", offset=len(regex) - 1
        )
    return regex.replace("\\/", "/").replace("/", "\\/") if "/" in regex else regex


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
