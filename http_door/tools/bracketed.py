"""The end of a bracketed value, found while it comes: brackets are counted outside of strings."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

from http_door.tools.reader import MAX_HELD, Marks, Reader, Reading

MAX_DEPTH = 100  # as for messages that clients send
_CLOSING = {"{": "}", "[": "]", "(": ")"}


@dataclass(frozen=True)
class Syntax:
    """What may stand in a value.

    plain    a run of characters outside of strings, brackets apart
    quotes   what begins a string, and ends it again
    escapes  a backslash in a string takes the next character's meaning
    """

    plain: re.Pattern[str]
    quotes: tuple[str, ...]
    escapes: bool

    @cached_property
    def marks(self) -> Marks:
        """What ends a run."""
        return Marks(*_CLOSING, *_CLOSING.values(), *self.quotes)

    @cached_property
    def strings(self) -> Mapping[str, tuple[re.Pattern[str], Marks]]:
        """By the quote: what is inside of a string, and its end."""
        escape = r"\\" if self.escapes else ""
        return {
            quote: (re.compile(f"[^{re.escape(quote[0])}{escape}]*"), Marks(quote)) for quote in self.quotes
        }


JSON = Syntax(re.compile(r"[\s,:+\-.0-9A-Za-z]*"), ('"',), escapes=True)
PYTHON = Syntax(re.compile(r"[\s,:=+\-*.0-9A-Za-z_]*"), ('"', "'"), escapes=True)


def take_bracketed(text: Reader, syntax: Syntax) -> Reading[str]:
    """Hold a value that begins with a bracket, to the bracket that closes it; returns it.

    "" if it ends before, is too deep or too long, or holds what it may not: then all to there is held.
    """
    begin = text.mark()
    closed = yield from _take(text, syntax)
    return text.since(begin) if closed else ""


def stream_bracketed(text: Reader, syntax: Syntax, say: Callable[[str], None]) -> Reading[bool]:
    """The same, but say each piece as it comes and hold nothing. Whether it was closed."""
    taking = _take(text, syntax)
    while True:
        try:
            next(taking)
        except StopIteration as ended:
            say(text.release())
            return bool(ended.value)
        say(text.release())
        yield


def _take(text: Reader, syntax: Syntax) -> Reading[bool]:
    """Whether it was closed."""
    expected: list[str] = []
    while True:
        mark = yield from text.take_mark(syntax.marks)
        if mark in _CLOSING:
            expected.append(_CLOSING[mark])
        elif mark in syntax.quotes and expected:
            yield from _take_string(text, mark, syntax)
        elif not mark or not expected or expected.pop() != mark:
            return False
        if len(expected) > MAX_DEPTH or text.num_held > MAX_HELD:
            return False
        if not expected:
            return True
        yield from text.take_run(syntax.plain)


def _take_string(text: Reader, quote: str, syntax: Syntax) -> Reading[None]:
    """To behind the quote that ends it, or to the end of the text, or of what may be held."""
    inside, end = syntax.strings[quote]
    while text.num_held <= MAX_HELD:
        yield from text.take_run(inside)
        if (yield from text.take_mark(end)):
            return
        is_escape = syntax.escapes and (yield from text.peek(1)) == "\\"
        if not text.take(len((yield from text.peek(2 if is_escape else 1)))):
            return
