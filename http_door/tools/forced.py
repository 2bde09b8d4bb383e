"""Calls that a request demands: a grammar that lets the model write nothing else, and the parser of what it writes.

Since the grammar makes the arguments valid, they are passed on as they come. Where a family's marks are special tokens
they are left out: a grammar is about text, and the parser knows what the text is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from http_door.tools.bracketed import JSON, stream_bracketed
from http_door.tools.calls import CallWriter
from http_door.tools.formats import Format, parser_of
from http_door.tools.reader import Marks, Reader, Reading, ReadingParser
from pdserve.grammar.lark import json_rule
from pdserve.grammar.quoting import quoted_text
from pdserve.ids import Random
from pdserve.structure import Structure

MAX_CALLS = 16  # that one answer makes: a model that may go on at times doesn't end


@dataclass(frozen=True, slots=True)
class Form:
    """The text around names and arguments.

    begin, end   of all calls
    before       the name
    between      name and arguments
    behind       the arguments
    then         between two calls
    """

    before: str
    between: str
    behind: str
    then: str
    begin: str = ""
    end: str = ""


_HERMES = Form('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", "\n")
_LLAMA = Form('{"name": "', '", "parameters": ', "}", "; ")
_PYTHONIC = Form("", "(**", ")", ", ", begin="[", end="]")
_LIST = Form('{"name": "', '", "arguments": ', "}", ", ", begin="[", end="]")
_FORMS = {"hermes": _HERMES, "llama3_json": _LLAMA, "pythonic": _PYTHONIC}


def form_of(name: str) -> Form:
    """Of a format in FORMATS; of a model that has none, a list in JSON."""
    return _FORMS.get(name, _LIST)


def forced_calls(form: Form, functions: Mapping[str, Mapping[str, Any]], *, is_one: bool) -> Structure:
    """The grammar of calls of these functions, whose parameters are JSON schemas by name.

    is_one  exactly one call; else up to MAX_CALLS
    """
    more = "" if is_one else f" ({quoted_text(form.then)} call){{0,{MAX_CALLS - 1}}}"
    numbers = range(len(functions))
    lines = [
        f"start: {quoted_text(form.begin)} call{more} {quoted_text(form.end)}",
        f"call: {' | '.join(f'call_{n}' for n in numbers)}",
    ]
    for n, (name, schema) in enumerate(functions.items()):
        head = quoted_text(form.before + name + form.between)
        lines.append(f"call_{n}: {head} arguments_{n} {quoted_text(form.behind)}")
        lines.append(f"arguments_{n}: {json_rule(_closed(schema))}")
    return Structure.grammar("\n".join(lines))


def forced_parser(form: Form, style: Format, names: Sequence[str], rng: Random) -> ReadingParser:
    """The parser of one text that this grammar let through, whole or cut off."""
    return parser_of(style, lambda text, output: _read(text, output, form, names), rng)


def _closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A function takes an object, and nothing that its schema doesn't name unless it says so."""
    return {"type": "object", "properties": {}, "additionalProperties": False, **schema}


def _read(text: Reader, output: CallWriter, form: Form, names: Sequence[str]) -> Reading[None]:
    heads = {form.before + name + form.between: name for name in names}
    head_marks, behind, then = Marks(*heads), Marks(form.behind), Marks(form.then)
    if form.begin:
        yield from text.take_mark(Marks(form.begin))
    while head := (yield from text.take_mark(head_marks)):
        index = output.begin(heads[head])
        text.release()
        yield from stream_bracketed(text, JSON, partial(output.arguments, index))
        if not (yield from text.take_mark(behind)) or not (yield from text.take_mark(then)):
            break
    if form.end:
        yield from text.take_mark(Marks(form.end))
    text.release()
    rest: list[str] = []
    yield from text.say_rest(rest.append)
    cut_off = "".join(rest)
    if not any(mark.startswith(cut_off) for mark in (*heads, form.behind, form.then, form.begin, form.end)):
        output.content(cut_off)
