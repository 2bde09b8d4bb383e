"""`[f(city="Paris", days=[1, 2]), g()]`: Python's call syntax with literals, read without running any of it."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

from http_door.tools.calls import FunctionCall, is_name, written_json

_TOKEN = re.compile(
    # Digits are never given back: to try each shorter number takes the square of their time.
    r"""\s*(?:
      (?P<number>[+-]?(?:\d++\.?\d*+|\.\d++)(?:[eE][+-]?\d++)?+)(?![\w.])
    | (?P<name>[A-Za-z_][\w.]*)
    | (?P<string>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')
    | (?P<mark>\*\*|[\[\](){},:=])
    )""",
    re.VERBOSE | re.DOTALL,
)
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|x[0-9a-fA-F]{2}|\n|.)", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\n": ""}
_WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}


def python_calls(text: str) -> Sequence[FunctionCall]:
    """The calls of a list of calls; none if it is anything else.

    Takes text whose brackets are known to close, at a bounded depth.
    """
    try:
        tokens = _Tokens(text)
        tokens.expect("[")
        calls = _separated(tokens, "]", lambda: _call(tokens))
        tokens.check_end()
    except ValueError:
        return ()
    return calls


class _Tokens:
    """The tokens of a text, read one by one. Raises ValueError for what is none."""

    def __init__(self, text: str) -> None:
        self._text = text.rstrip()
        self._at = 0
        self.kind = self.word = ""  # of the token that is next
        self._step()

    def next(self, kind: str) -> str:
        """The next token, which must be of this kind."""
        if self.kind != kind:
            raise ValueError("another kind of token", self.kind)
        word = self.word
        self._step()
        return word

    def expect(self, mark: str) -> None:
        """Pass over it."""
        if not self.has(mark):
            raise ValueError("another token", self.word)

    def has(self, mark: str) -> bool:
        """Pass over it if it is next."""
        found = self.kind == "mark" and self.word == mark
        if found:
            self._step()
        return found

    def check_end(self) -> None:
        if self.kind:
            raise ValueError("more than one value")

    def _step(self) -> None:
        if self._at == len(self._text):
            self.kind = self.word = ""
            return
        found = _TOKEN.match(self._text, self._at)
        if found is None:
            raise ValueError("not a token", self._at)
        self._at = found.end()
        self.kind = found.lastgroup or ""
        self.word = found[self.kind]


def _separated(tokens: _Tokens, closing: str, item: Callable[[], Any]) -> list[Any]:
    """Items to the closing bracket; a comma may stand before it."""
    items: list[Any] = []
    while not tokens.has(closing):
        items.append(item())
        if not tokens.has(","):
            tokens.expect(closing)
            break
    return items


def _call(tokens: _Tokens) -> FunctionCall:
    name = tokens.next("name")
    if not is_name(name):
        raise ValueError("not a name", name)
    arguments: dict[str, Any] = {}

    def argument() -> None:
        if tokens.has("**"):  # f(**{"city": "Paris"})
            tokens.expect("{")
            given = dict(_separated(tokens, "}", lambda: _pair(tokens)))
        else:
            key = tokens.next("name")
            tokens.expect("=")
            given = {key: _value(tokens)}
        if arguments.keys() & given.keys():
            raise ValueError("an argument stands twice")
        arguments.update(given)

    tokens.expect("(")
    _separated(tokens, ")", argument)
    return FunctionCall(name, written_json(arguments))


def _value(tokens: _Tokens) -> Any:
    match tokens.kind:
        case "string":
            return _unquoted(tokens.next("string"))
        case "number":
            return _number(tokens.next("number"))
        case "name":
            word = tokens.next("name")
            if word not in _WORDS:
                raise ValueError("not a value", word)
            return _WORDS[word]
    if tokens.has("{"):
        return dict(_separated(tokens, "}", lambda: _pair(tokens)))
    closing = ")" if tokens.has("(") else "]"
    if closing == "]":
        tokens.expect("[")
    return _separated(tokens, closing, lambda: _value(tokens))


def _pair(tokens: _Tokens) -> tuple[str, Any]:
    key = _unquoted(tokens.next("string"))
    tokens.expect(":")
    return key, _value(tokens)


def _number(text: str) -> int | float:
    try:
        return int(text)  # raises ValueError for thousands of digits as well
    except ValueError:
        return float(text)


def _unquoted(text: str) -> str:
    return _ESCAPE.sub(_escaped, text[1:-1])


def _escaped(found: re.Match[str]) -> str:
    code = found[1]
    if len(code) > 1:
        number = int(code[1:], 16)
        if number > sys.maxunicode:
            raise ValueError("not a character", code)
        return chr(number)
    return _ESCAPED.get(code, code if code in "\\'\"" else f"\\{code}")
