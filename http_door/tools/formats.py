"""The formats of tool calls by name, and the parser of one choice."""

from __future__ import annotations

import string
from collections.abc import Callable, Collection
from dataclasses import dataclass

from http_door.tools.bare import read_llama3_json, read_pythonic
from http_door.tools.calls import CallWriter
from http_door.tools.gemma import read_gemma
from http_door.tools.marked import read_hermes, read_mistral, read_phi4
from http_door.tools.reader import Reader, Reading, ReadingParser
from pdserve.ids import Random

_ALPHANUMERIC = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class Format:
    """How a family of models writes tool calls.

    read           reads a whole text; takes the names of the tools that were given
    call_id        prefix and number of drawn characters of a call's id: some templates refuse others
    special_marks  its marks are special tokens: text without them holds no calls
    """

    read: Callable[[Reader, CallWriter, Collection[str]], Reading[None]]
    special_marks: bool
    call_id: tuple[str, int] = ("call_", 24)


FORMATS = {
    "gemma": Format(lambda text, output, _: read_gemma(text, output), special_marks=True),
    "hermes": Format(lambda text, output, _: read_hermes(text, output), special_marks=False),
    "llama3_json": Format(read_llama3_json, special_marks=True),
    "mistral": Format(
        lambda text, output, _: read_mistral(text, output), special_marks=True, call_id=("", 9)
    ),
    "phi4": Format(lambda text, output, _: read_phi4(text, output), special_marks=True),
    "pythonic": Format(read_pythonic, special_marks=True),
}


def tool_parser(
    style: Format, names: Collection[str], rng: Random, *, most_calls: int | None = None
) -> ReadingParser:
    """A parser of one text.

    names       of the tools that were given
    rng         draws the calls' ids
    most_calls  those behind them are passed over; None = any number
    """
    return parser_of(style, lambda text, output: style.read(text, output, names), rng, most_calls)


def parser_of(
    style: Format,
    read: Callable[[Reader, CallWriter], Reading[None]],
    rng: Random,
    most_calls: int | None = None,
) -> ReadingParser:
    """A parser that reads in this way and makes ids as the format wants them."""
    prefix, size = style.call_id
    reader = Reader()
    output = CallWriter(lambda: prefix + _drawn(rng, size), most_calls)
    return ReadingParser(reader, _read_all(read(reader, output), output), output.parts)


def _drawn(rng: Random, size: int) -> str:
    return "".join(_ALPHANUMERIC[int(rng.random() * len(_ALPHANUMERIC))] for _ in range(size))


def _read_all(reading: Reading[None], output: CallWriter) -> Reading[None]:
    yield from reading
    output.end()
