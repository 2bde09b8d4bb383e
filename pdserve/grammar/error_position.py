"""Where in a user's regex, grammar or schema the library found an error: read from its words, or searched for."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from pdserve.grammar.quoting import offset_in_regex

MOST_PARTS = 500  # of a schema, looked at to find the one that is wrong
_LONGEST_POINTER = 200

_LARK_PLACE = re.compile(r"(?:at )?(\d+)\((\d+)\): ")
_OF_A_PATTERN = " (in regex): regex parse error:"
_CARET = re.compile(r" *\^+")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_SINGLE = ("items", "additionalProperties", "contains", "not", "propertyNames", "if", "then", "else")
_SHARED = ("$defs", "definitions", "$schema", "$id")


def without_place(message: str) -> str:
    """What the library's error says, without the place in the grammar that we made and the lines that it shows."""
    first = _LARK_PLACE.sub("", message.split("\n", 1)[0], count=1)
    why = pattern_error(message)
    return f"{first.removesuffix(_OF_A_PATTERN)}: {why}" if why else first


def grammar_place(message: str) -> dict[str, int]:
    """Line and column, both from 1, of a Lark grammar behind one line of ours."""
    found = _LARK_PLACE.match(message)
    return {} if found is None else {"line": int(found[1]) - 1, "column": int(found[2])}


def regex_error(message: str, regex: str) -> tuple[str, dict[str, int]]:
    """What is wrong with a regex, and where, as far as the library says.

    It shows the quoted pattern, indented by 4, and a caret below.
    """
    why = pattern_error(message)
    if not why:
        return without_place(message).rpartition("(in regex): ")[2], {}
    lines = message.split("\n")
    caret = next((number for number, line in enumerate(lines) if number and _CARET.fullmatch(line)), None)
    if caret is None:
        return why, {}
    shown, at = lines[caret - 1], lines[caret].index("^")
    if "\n" not in regex:
        return why, {"offset": offset_in_regex(regex, at - 4)}
    number = shown.partition(": ")[0]  # of the line
    line = regex.split("\n")[int(number) - 1]
    return why, {"line": int(number), "column": offset_in_regex(line, at - len(number) - 2) + 1}


def pattern_error(message: str) -> str:
    """What is wrong with a pattern, wherever it stands; "" if that isn't the error."""
    return next((line[7:] for line in message.split("\n") if line.startswith("error: ")), "")


def schema_place(schema: dict[str, Any], message: str, error_of: Callable[[dict[str, Any]], str]) -> str:
    """JSON pointer to the innermost part of a schema that alone gives the same error; "#" = all of it.

    error_of  the library's error of a schema, "" if there is none
    """
    shared = {name: schema[name] for name in _SHARED if name in schema}
    place, part = "#", schema
    num_left = MOST_PARTS
    while len(place) < _LONGEST_POINTER:
        for name, inner in _parts(part):
            num_left -= 1
            if num_left < 0:
                return place
            if error_of({**shared, **inner}) == message:
                place, part = f"{place}/{name}", inner
                break
        else:
            break
    return place


def _parts(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The schemas directly inside a schema, by their pointers from it."""
    for name in _MAPS:
        inner = schema.get(name)
        if isinstance(inner, dict):
            for key, part in inner.items():
                if isinstance(part, dict):
                    yield f"{name}/{_pointer(key)}", part
    for name in _LISTS:
        inner = schema.get(name)
        if isinstance(inner, list):
            for number, part in enumerate(inner):
                if isinstance(part, dict):
                    yield f"{name}/{number}", part
    for name in _SINGLE:
        inner = schema.get(name)
        if isinstance(inner, dict):
            yield name, inner


def _pointer(key: str) -> str:
    """One step of a JSON pointer (RFC 6901)."""
    return key.replace("~", "~0").replace("/", "~1")
