"""What a model's text is taken apart into, and who does it: a parser for each choice of each request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that the model wrote to itself before it answered."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A tool call; its arguments follow. index: from 0, in the order of the text."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """A piece of the JSON object that a call's arguments are."""

    index: int
    text: str


Parsed = Content | Reasoning | CallBegun | Arguments


class OutputParser(Protocol):
    """Takes one choice's text apart while it comes. No IO; one thread at a time.

    What it gives, put together, is the same however the text was cut. Nothing of the text is said twice, and nothing
    is lost: what looks like a call but isn't one is content.
    """

    def feed(self, text: str) -> list[Parsed]:
        """What is certain with this piece of text; never raises for what a model writes."""
        ...

    def finish(self) -> list[Parsed]:
        """The text has ended: what was held back. Called once."""
        ...


class PlainText:
    """The parser of a request without tools or reasoning: everything is content."""

    def feed(self, text: str) -> list[Parsed]:
        return [Content(text)] if text else []

    def finish(self) -> list[Parsed]:
        return []


class Chained:
    """Two parsers: the content of the first is the text of the second."""

    def __init__(self, first: OutputParser, second: OutputParser) -> None:
        self._first = first
        self._second = second

    def feed(self, text: str) -> list[Parsed]:
        return self._pass_on(self._first.feed(text))

    def finish(self) -> list[Parsed]:
        return [*self._pass_on(self._first.finish()), *self._second.finish()]

    def _pass_on(self, parts: list[Parsed]) -> list[Parsed]:
        found: list[Parsed] = []
        for part in parts:
            found.extend(self._second.feed(part.text) if isinstance(part, Content) else [part])
        return found
