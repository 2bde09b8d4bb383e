"""FunctionGemma's and Gemma 4's calls.

<start_function_call>call:f{city:<escape>Paris<escape>,n:3}<end_function_call>
<|tool_call>call:f{city:<|"|>Paris<|"|>,n:3}<tool_call|>
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from http_door.tools.bracketed import Syntax, take_bracketed
from http_door.tools.calls import CallWriter, FunctionCall, is_name, written_json
from http_door.tools.marked import pass_over
from http_door.tools.reader import Marks, Reader, Reading

_FUNCTION_CALL, _TOOL_CALL = "<start_function_call>", "<|tool_call>"
_OPENINGS = Marks(_FUNCTION_CALL, _TOOL_CALL)
_CLOSING = {_FUNCTION_CALL: Marks("<end_function_call>"), _TOOL_CALL: Marks("<tool_call|>")}
_QUOTES = {_FUNCTION_CALL: "<escape>", _TOOL_CALL: '<|"|>'}
_SYNTAX = {
    opening: Syntax(re.compile(r"[\s,:+\-.0-9A-Za-z_$]*"), (quote,), escapes=False)
    for opening, quote in _QUOTES.items()
}
_BARE = re.compile(r"[^{}\[\],:<]*")
_HEAD = "call:"
_HEAD_MARK = Marks(_HEAD)
_NAME = re.compile(r"[\w.-]*")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_WORDS = {"true": True, "false": False, "null": None}


def read_gemma(text: Reader, output: CallWriter) -> Reading[None]:
    """Both formats."""
    while opening := (yield from text.text_until(output.content, _OPENINGS)):
        yield from text.take_blanks()
        begin = text.mark()
        if (yield from text.take_mark(_HEAD_MARK)):
            yield from text.take_run(_NAME)
        name = text.since(begin).removeprefix(_HEAD)
        yield from text.take_blanks()
        value = yield from take_bracketed(text, _SYNTAX[opening])
        try:
            call = _call(name, value, _QUOTES[opening])
        except ValueError:
            output.content(text.release())
            continue
        text.release()
        output.call(call)
        yield from pass_over(text, output, _CLOSING[opening])


def _call(name: str, value: str, quote: str) -> FunctionCall:
    """Raises ValueError."""
    if not is_name(name):
        raise ValueError("not a name", name)
    values = _Values(value, quote)
    arguments = values.read()
    if not isinstance(arguments, dict) or values.at != len(value):
        raise ValueError("not an object")
    return FunctionCall(name, written_json(arguments))


class _Values:
    """Reads one value, of text whose brackets are known to close, at a bounded depth."""

    def __init__(self, text: str, quote: str) -> None:
        self._text = text
        self._quote = quote
        self.at = 0

    def read(self) -> Any:
        """Raises ValueError."""
        if self._has("{"):
            return dict(self._separated("}", self._member))
        if self._has("["):
            return self._separated("]", self.read)
        text, is_string = self._scalar()
        if is_string:
            return text
        return _WORDS[text] if text in _WORDS else _number_or_text(text)

    def _separated(self, closing: str, item: Callable[[], Any]) -> list[Any]:
        items: list[Any] = []
        while not self._has(closing):
            items.append(item())
            if not self._has(","):
                self._expect(closing)
                break
        return items

    def _member(self) -> tuple[str, Any]:
        key, _ = self._scalar()
        self._expect(":")
        return key, self.read()

    def _scalar(self) -> tuple[str, bool]:
        """A text, and whether it stood in quotes."""
        if self._has(self._quote):
            end = self._text.find(self._quote, self.at)
            text, self.at = self._text[self.at : end], end + len(self._quote)
            return text, True
        found = _BARE.match(self._text, self.at)
        if found is None or not found[0].strip():
            raise ValueError("neither key nor value", self.at)
        self.at = found.end()
        return found[0].strip(), False

    def _has(self, mark: str) -> bool:
        """Pass over blanks, and over the mark if it is next."""
        while self._text[self.at : self.at + 1].isspace():
            self.at += 1
        found = self._text.startswith(mark, self.at)
        if found:
            self.at += len(mark)
        return found

    def _expect(self, mark: str) -> None:
        if not self._has(mark):
            raise ValueError("another character", self.at)


def _number_or_text(text: str) -> int | float | str:
    """A number as JSON writes it: Python would take 12_34, nan and Infinity for one as well."""
    number: int | float | str = json.loads(text) if _NUMBER.fullmatch(text) else text
    return number
