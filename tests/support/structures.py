"""Structures for tests, each with what makes a text right, by others: a JSON Schema validator, Python's regexes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jsonschema

from pdserve.structure import Structure, StructureKind


@dataclass(frozen=True)
class Wish:
    """is_right  whether a whole text satisfies it; max_tokens: bytes that the longest one has, more or less"""

    name: str
    structure: Structure
    is_right: Callable[[str], bool]
    max_tokens: int

    @property
    def is_json(self) -> bool:
        return self.structure.kind in (StructureKind.JSON_SCHEMA, StructureKind.JSON_OBJECT)

    def __str__(self) -> str:
        return self.name


def of_schema(name: str, schema: dict[str, Any], max_tokens: int) -> Wish:
    validator = jsonschema.Draft202012Validator(schema)

    def is_right(text: str) -> bool:
        try:
            return bool(validator.is_valid(json.loads(text)))
        except ValueError:
            return False

    return Wish(name, Structure.json_schema(schema), is_right, max_tokens)


def of_regex(regex: str, max_tokens: int) -> Wish:
    return Wish(
        f"/{regex}/", Structure.regex(regex), lambda text: bool(re.fullmatch(regex, text)), max_tokens
    )


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def _obj(required: list[str], **properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object", "properties": properties, "required": required, "additionalProperties": False,
    }  # fmt: skip


AGE = {"type": "integer", "maximum": 150, "minimum": 0}
CHOICES = ("yes", "no", "no, never", "vielleicht", "ja: é")
SCHEMAS = (
    of_schema("string", {"type": "string", "minLength": 2, "maxLength": 12}, 120),
    of_schema("number", {"type": "number", "minimum": -10, "maximum": 99.5}, 300),
    of_schema("enum", {"enum": ["red", "green", 3, None, True, {"a": [1, 2]}]}, 200),
    of_schema(
        "array",
        {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 300}, "minItems": 1, "maxItems": 3},
        400,
    ),
    of_schema(
        "nested",
        _obj(
            ["who", "is"],
            who=_obj(["name"], name={"type": "string", "maxLength": 8}, age=AGE),
            **{"is": {"type": "boolean"}},
            tags={"type": "array", "items": {"enum": ["a", "bc"]}, "maxItems": 2},
        ),
        1600,
    ),
    of_schema(
        "any of, with a reference",
        {
            "$defs": {"id": {"type": "string", "pattern": "^[A-F]{2}-[0-9]{3}$"}},
            "anyOf": [_obj(["id"], id={"$ref": "#/$defs/id"}), {"type": "null"}],
        },
        300,
    ),
)  # fmt: skip
REGEXES = (
    of_regex("[a-z]{3,5}@[a-z]{2}\\.(?:org|net)", 40),
    of_regex("(?:0x[0-9a-f]{1,8}|-?[1-9][0-9]{0,3})", 20),
    of_regex("[äöü]{2}(?:ß|ss)!?", 20),
)
OTHERS = (
    Wish("choices", Structure.choices(CHOICES), CHOICES.__contains__, 20),
    Wish(
        "grammar",
        Structure.grammar('start: item ("," item){0,3}\nitem: NAME "=" /[0-9]{1,3}/\nNAME: /[a-d]{1,4}/'),
        lambda text: bool(re.fullmatch(r"[a-d]{1,4}=[0-9]{1,3}(?:,[a-d]{1,4}=[0-9]{1,3}){0,3}", text)),
        60,
    ),
    Wish(
        "gbnf",
        Structure.grammar('root ::= "(" root ")" | word\nword ::= [a-z] [a-z]'),
        lambda text: bool(re.fullmatch(r"\(*[a-z]{2}\)*", text)) and text.count("(") == text.count(")"),
        100,
    ),
)
WISHES = (*SCHEMAS, *REGEXES, *OTHERS)
JSON_OBJECT = Wish("json object", Structure.json_object(), _is_object, 2000)
