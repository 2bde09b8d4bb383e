"""Parsers fed with texts, and what they said, put together."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

from http_door.tools.formats import FORMATS, tool_parser
from http_door.tools.port import Arguments, CallBegun, Content, OutputParser, Parsed, Reasoning

GOLDEN = Path(__file__).with_name("golden")
NAMES = ("f", "g")


@dataclass(frozen=True)
class Apart:
    """A whole text, taken apart; calls: name and arguments."""

    content: str
    reasoning: str
    calls: tuple[tuple[str, str], ...]


def golden() -> list[tuple[str, dict[str, Any]]]:
    """Format and case: about, text, content, calls."""
    return [
        (path.stem, case) for path in sorted(GOLDEN.glob("*.json")) for case in json.loads(path.read_text())
    ]


def parser(name: str, names: Sequence[str] = NAMES) -> OutputParser:
    return tool_parser(FORMATS[name], names, Random(7))


def parts_of(parser: OutputParser, pieces: Iterable[str]) -> list[Parsed]:
    """All that it says of a text in these pieces."""
    return [part for piece in pieces for part in parser.feed(piece)] + parser.finish()


def put_together(parts: Iterable[Parsed]) -> Apart:
    content, reasoning = [], []
    calls: list[tuple[str, list[str]]] = []
    ids = set()
    for part in parts:
        match part:
            case Content(text):
                assert text
                content.append(text)
            case Reasoning(text):
                assert text
                reasoning.append(text)
            case CallBegun(index, call_id, name):
                assert index == len(calls) and call_id not in ids
                ids.add(call_id)
                calls.append((name, []))
            case Arguments(index, text):
                assert text and index == len(calls) - 1, "arguments of the newest call only"
                calls[index][1].append(text)
    return Apart("".join(content), "".join(reasoning), tuple((name, "".join(told)) for name, told in calls))


def apart(make: Callable[[], OutputParser], pieces: Iterable[str]) -> Apart:
    return put_together(parts_of(make(), pieces))


def pieces_of(text: str, cuts: Iterable[int]) -> list[str]:
    """The text, cut at these places."""
    places = [0, *sorted({min(cut, len(text)) for cut in cuts}), len(text)]
    return [text[begin:end] for begin, end in pairwise(places)]
