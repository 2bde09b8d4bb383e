r"""Grammars in GBNF, llama.cpp's language, as Lark.

A GBNF grammar speaks of characters, Lark of lexemes, of which the longest wins: in `term "\n"` with a term that may end
with blanks, the newline would never be seen. So a grammar without recursion becomes a single lexeme, which is exact and
fast; one with recursion gets a lexeme for each character, which is exact.
Source of the language: llama.cpp's grammars/README.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn

from pdserve.errors import InvalidRequest
from pdserve.grammar.quoting import quoted_char, quoted_text

_ROOT = "root"
_ANY = r"/[\x{0}-\x{10FFFF}]/"
_TOKENS = re.compile(
    r"""(?P<blank>[ \t\r\n]+|\#[^\r\n]*)
      | (?P<head>[\w-]+)[ \t]*::=
      | (?P<name>[\w-]+)
      | "(?P<literal>(?:[^"\\]|\\.)*)"
      | \[(?P<class>(?:[^\]\\]|\\.)*)\]
      | (?P<token><\[\d+\]>|<[^<>\s]+>)
      | (?P<repeat>[*+?]|\{\s*\d+\s*(?:,\s*\d*\s*)?\})
      | (?P<sign>[|().])""",
    re.VERBOSE | re.DOTALL | re.ASCII,
)
_CHAR = re.compile(
    r"\\x([0-9A-Fa-f]{2})|\\u([0-9A-Fa-f]{4})|\\U([0-9A-Fa-f]{8})|\\([trn\\\"\[\]-])|([^\\])", re.DOTALL
)
_CONTROL = {"t": "\t", "r": "\r", "n": "\n"}


def gbnf_to_lark(text: str) -> str:
    """The same grammar in Lark. Raises InvalidRequest with line and column."""
    return _Grammar(text).to_lark()


@dataclass(frozen=True, slots=True)
class _Token:
    """text: without what is around a literal or class; text_offset: where that begins."""

    kind: str
    text: str
    offset: int
    text_offset: int


class _Grammar:
    def __init__(self, text: str) -> None:
        self._text = text
        self._rules: dict[str, list[_Token]] = {}  # name → what stands behind `::=`
        rule: list[_Token] | None = None
        for token in self._tokens():
            if token.kind == "head":
                rule = self._rules[token.text] = []  # of two with one name the later counts, as in llama.cpp
            elif rule is None:
                self._refuse("a grammar begins with NAME ::=", token.offset)
            else:
                rule.append(token)
        for name in (each for rule in self._rules.values() for each in rule if each.kind == "name"):
            if name.text not in self._rules:
                self._refuse(f"there is no rule {name.text!r}", name.offset)
        if _ROOT not in self._rules:
            raise InvalidRequest("grammar can't be used", why=f"there is no rule {_ROOT!r}")

    def to_lark(self) -> str:
        needs = self._needs()
        self._is_regular = _has_order(needs) and not any(
            token.kind == "token" for name in needs for token in self._rules[name]
        )
        letter = "R" if self._is_regular else "r"  # which tells lexemes from rules
        self._lark_names = {name: f"{letter}{number}" for number, name in enumerate(self._rules)}
        bodies = {name: self._body(rule) for name, rule in self._rules.items()}  # may refuse any of them
        lines = [f"{self._lark_names[name]}: {bodies[name]}" for name in needs]
        return "\n".join([f"start: {self._lark_names[_ROOT]}", *lines]) + "\n"

    def _tokens(self) -> Iterator[_Token]:
        offset = 0
        while offset < len(self._text):
            found = _TOKENS.match(self._text, offset)
            if found is None:
                self._refuse("this is not GBNF", offset)
            kind = str(found.lastgroup)
            if kind != "blank":
                yield _Token(kind, found[kind], offset, found.start(kind))
            offset = found.end()

    def _needs(self) -> dict[str, set[str]]:
        """The rules that the root needs, itself first, each with those that it names."""
        needs: dict[str, set[str]] = {}
        open_ = [_ROOT]
        while open_:
            name = open_.pop()
            if name not in needs:
                needs[name] = {token.text for token in self._rules[name] if token.kind == "name"}
                open_.extend(sorted(needs[name]))
        return needs

    def _body(self, rule: list[_Token]) -> str:
        """What stands behind a rule's name in Lark."""
        levels: list[list[str]] = [[]]  # the parts of each group that is open, the rule itself first
        begins: list[int] = []
        for token in rule:
            parts = levels[-1]
            match token.kind, token.text:
                case "repeat", times:
                    if not parts or parts[-1] == "|":
                        self._refuse("nothing before this can be repeated", token.offset)
                    parts[-1] = self._repeated(parts[-1], times, token.offset)
                case "sign", "(":
                    levels.append([])
                    begins.append(token.offset)
                case "sign", ")":
                    if not begins:
                        self._refuse("this parenthesis closes nothing", token.offset)
                    begins.pop()
                    levels.pop()
                    levels[-1].append(f"({' '.join(parts)})")
                case _:
                    parts.append(self._part(token))
        if begins:
            self._refuse("this parenthesis isn't closed", begins[-1])
        return " ".join(levels[0])

    def _part(self, token: _Token) -> str:
        match token.kind:
            case "name":
                return self._lark_names[token.text]
            case "literal":
                chars = [char for char, _ in self._chars(token)]
                if self._is_regular or len(chars) < 2:
                    return quoted_text("".join(chars))
                return f"({' '.join(map(quoted_text, chars))})"
            case "class":
                return self._class(token)
            case "token":
                return token.text
        return _ANY if token.text == "." else token.text

    def _repeated(self, part: str, times: str, offset: int) -> str:
        if not times.startswith("{"):
            return f"({part}){times}"
        least, comma, most = (number.strip() for number in times[1:-1].partition(","))
        most = most if comma else least
        if most and int(most) < int(least):
            self._refuse("its upper bound is below its lower one", offset)
        return '""' if most and not int(most) else f"({part}){{{least},{most}}}"

    def _class(self, token: _Token) -> str:
        is_negated = token.text.startswith("^")
        chars = list(self._chars(token, int(is_negated)))
        parts = []
        while chars:
            low, offset = chars.pop(0)
            high = low
            # The hyphen of a range is a plain one, with something behind it.
            if len(chars) > 1 and chars[0][0] == "-" and self._text[chars[0][1]] == "-":
                high = chars[1][0]
                del chars[:2]
            if high < low:
                self._refuse("this range ends before it begins", offset)
            parts.append(quoted_char(low) if low == high else f"{quoted_char(low)}-{quoted_char(high)}")
        if not parts:
            self._refuse("this class is empty", token.offset)
        return f"/[{'^' if is_negated else ''}{''.join(parts)}]/"

    def _chars(self, token: _Token, begin: int = 0) -> Iterator[tuple[str, int]]:
        """The characters of a literal or class, and where they are written."""
        place = begin
        while place < len(token.text):
            found = _CHAR.match(token.text, place)
            offset = token.text_offset + place
            if found is None:
                self._refuse("unknown escape", offset)
            code = found[1] or found[2] or found[3]
            number = int(code, 16) if code else 0
            if number > 0x10FFFF or 0xD800 <= number <= 0xDFFF:
                self._refuse("this is no character", offset)
            yield chr(number) if code else _CONTROL.get(found[4], found[4] or found[5]), offset
            place = found.end()

    def _refuse(self, why: str, offset: int) -> NoReturn:
        line_begin = self._text.rfind("\n", 0, offset) + 1
        raise InvalidRequest(
            "grammar can't be used",
            why=why,
            line=self._text.count("\n", 0, offset) + 1,
            column=offset - line_begin + 1,
        )


def _has_order(needs: dict[str, set[str]]) -> bool:
    """Whether no rule needs itself, be it through others."""
    left = set(needs)
    while left:
        ready = {name for name in left if not needs[name] & left}
        if not ready:
            return False
        left -= ready
    return True
