"""Calls as the formats write them, and as clients get them: a name, and arguments as the text of a JSON object."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from http_door.tools.port import Arguments, CallBegun, Content, Parsed
from http_door.tools.reader import without_end

_BLANKS = re.compile(r"[ \t\r\n]*")
_NAME = re.compile(r"[\w.:/-]{1,256}")
_ARGUMENTS = ("arguments", "parameters")
_PASSED_OVER = ("id", "type")


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """arguments: a JSON object, as the model has written it where that is JSON."""

    name: str
    arguments: str


class CallWriter:
    """What a format has found.

    White space around calls belongs to them; other white space is content.

    most_calls  those behind them are passed over; None = any number
    """

    def __init__(self, new_call_id: Callable[[], str], most_calls: int | None = None) -> None:
        self.parts: list[Parsed] = []
        self._new_call_id = new_call_id
        self._blanks = ""  # not said yet: a call may follow
        self._num_calls = 0
        self._most_calls = most_calls

    def content(self, text: str) -> None:
        """Text that is no call."""
        text = self._blanks + text
        said, self._blanks = without_end(text, None)
        if said:
            self.parts.append(Content(said))

    def call(self, call: FunctionCall) -> None:
        """A whole one."""
        if self._most_calls is None or self._num_calls < self._most_calls:
            self.arguments(self.begin(call.name), call.arguments)
        self._blanks = ""

    def begin(self, name: str) -> int:
        """A call whose arguments will follow; returns its index."""
        index, self._num_calls = self._num_calls, self._num_calls + 1
        self._blanks = ""
        self.parts.append(CallBegun(index, self._new_call_id(), name))
        return index

    def arguments(self, index: int, text: str) -> None:
        """More of them."""
        if text:
            self.parts.append(Arguments(index, text))

    def end(self) -> None:
        """The text has ended."""
        if self._blanks and not self._num_calls:
            self.parts.append(Content(self._blanks))


def json_calls(text: str) -> Sequence[FunctionCall]:
    """Of `{"name": …, "arguments": {…}}`, or a list of such; none if it is anything else.

    Takes text whose brackets are known to close, at a bounded depth.
    """
    try:
        if text.startswith("{"):
            return (_call(text),)
        return [_call(text[begin:end]) for begin, end, _ in _items(text, "]")]
    except (ValueError, RecursionError):
        return ()


def json_object(text: str) -> str:
    """The same object, valid JSON by the letter. Raises ValueError if it is none."""
    try:
        value, end = _STRICT.raw_decode(text)
        written = text
    except ValueError:
        value, end = _LENIENT.raw_decode(text)
        written = written_json(value)
    if not isinstance(value, dict) or end != len(text):
        raise ValueError("not one object")
    return written


def written_json(value: Any) -> str:
    """JSON that can be sent as UTF-8. Raises ValueError for numbers that JSON hasn't."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text if is_unicode(text) else json.dumps(value)


def is_unicode(text: str) -> bool:
    """Whether it has no half of a surrogate pair."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def is_name(text: object) -> TypeGuard[str]:
    """Whether a function may be called so."""
    return isinstance(text, str) and _NAME.fullmatch(text) is not None


def _no_constant(name: str) -> None:
    raise ValueError("JSON has no such number", name)


_STRICT = json.JSONDecoder(parse_constant=_no_constant)
# Line breaks and tabs in strings, which models write at times.
_LENIENT = json.JSONDecoder(parse_constant=_no_constant, strict=False)


def _call(text: str) -> FunctionCall:
    """Raises ValueError."""
    name, arguments = "", ""
    for key, begin, end, value in _members(text):
        if key == "name" and not name and is_name(value):
            name = value
        elif key in _ARGUMENTS and not arguments:
            arguments = _arguments(text[begin:end], value)
        elif key not in _PASSED_OVER:
            raise ValueError("not a member of a call", key)
    if not name:
        raise ValueError("a call without a name")
    return FunctionCall(name, arguments or "{}")


def _arguments(text: str, value: Any) -> str:
    if value is None:
        return "{}"
    return json_object(value.strip() if isinstance(value, str) else text)


def _members(text: str) -> Iterator[tuple[str, int, int, Any]]:
    """Key, begin and end of the value, value, of each member of an object. Raises ValueError."""
    at = _behind(text, 0, "{")
    if text[at : at + 1] == "}":
        _check_end(text, at)
        return
    while True:
        key, at = _LENIENT.raw_decode(text, at)
        if not isinstance(key, str):
            raise ValueError("not a key")
        begin = _behind(text, _blanks_end(text, at), ":")
        value, end = _LENIENT.raw_decode(text, begin)
        yield key, begin, end, value
        at = _blanks_end(text, end)
        if text[at : at + 1] == "}":
            _check_end(text, at)
            return
        at = _behind(text, at, ",")


def _items(text: str, closing: str) -> Iterator[tuple[int, int, Any]]:
    """Begin, end and value of each item of a list. Raises ValueError, also for an empty list."""
    at = _behind(text, 0, "[")
    while True:
        value, end = _LENIENT.raw_decode(text, at)
        yield at, end, value
        at = _blanks_end(text, end)
        if text[at : at + 1] == closing:
            _check_end(text, at)
            return
        at = _behind(text, at, ",")


def _behind(text: str, at: int, mark: str) -> int:
    """Where the next thing begins."""
    if text[at : at + 1] != mark:
        raise ValueError("another character", at)
    return _blanks_end(text, at + 1)


def _blanks_end(text: str, at: int) -> int:
    found = _BLANKS.match(text, at)
    assert found is not None
    return found.end()


def _check_end(text: str, at: int) -> None:
    if at != len(text) - 1:
        raise ValueError("more than one value", at)
