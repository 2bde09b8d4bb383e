"""Structures in the grammar library's own language: every kind becomes one Lark grammar.

`no_forcing`: a token may follow if and only if its bytes can, whatever else would spell the same text.
"""

from __future__ import annotations

import json
import re
from typing import Any

from pdserve.errors import InvalidRequest
from pdserve.grammar.gbnf import gbnf_to_lark
from pdserve.grammar.quoting import quoted_regex, quoted_text
from pdserve.structure import Structure, StructureKind

HEADER = '%llguidance {"no_forcing": true}\n'
MOST_BLANKS = 32  # between two JSON tokens: models that may write blanks without end sometimes do
_JSON_OPTIONS = {"whitespace_pattern": rf"[ \t\n\r]{{0,{MOST_BLANKS}}}"}
_OPTIONS_KEY = "x-guidance"
_LARK_START = re.compile(r"^\s*(?:%llguidance\b|start\s*:(?!:=))", re.MULTILINE)


def to_lark(structure: Structure) -> str:
    """The grammar, HEADER first, with the structure's own text behind `start: ` in its second line.

    Raises InvalidRequest for errors that show without compiling: invalid JSON, a schema that is not an object.
    """
    match structure.kind:
        case StructureKind.JSON_SCHEMA:
            return schema_to_lark(read_schema(structure.text))
        case StructureKind.JSON_OBJECT:
            return schema_to_lark({"type": "object"})
        case StructureKind.REGEX:
            return f"{HEADER}start: {quoted_regex(structure.text)}"
        case StructureKind.CHOICES:
            return f"{HEADER}start: {' | '.join(quoted_text(text) for text in structure.texts)}"
        case StructureKind.GRAMMAR:
            return HEADER + (gbnf_to_lark(structure.text) if is_gbnf(structure.text) else structure.text)


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
    return f"{HEADER}start: {json_rule(schema)}"


def json_rule(schema: dict[str, Any]) -> str:
    """The same as a part of a grammar: what stands behind a rule's colon."""
    return f"%json {json.dumps({**schema, _OPTIONS_KEY: _JSON_OPTIONS})}"


def is_gbnf(text: str) -> bool:
    """Whether a grammar is written in GBNF (llama.cpp's), rather than in Lark."""
    return "::=" in text and _LARK_START.search(text) is None


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
