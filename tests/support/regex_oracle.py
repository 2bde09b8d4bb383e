"""Regular languages by derivatives: which bytes can begin a text, without any library.

Source: J. Brzozowski, "Derivatives of Regular Expressions", 1964.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, reduce


class Regex:
    """A set of byte strings."""

    def __str__(self) -> str:
        """In the common syntax."""
        raise NotImplementedError


@dataclass(frozen=True)
class Nothing(Regex):
    """No text at all."""


@dataclass(frozen=True)
class Empty(Regex):
    """The text without a byte."""

    def __str__(self) -> str:
        return "(?:)"


@dataclass(frozen=True)
class Bytes(Regex):
    """One character of one byte."""

    allowed: frozenset[int]

    def __str__(self) -> str:
        return "[" + "".join(chr(byte) for byte in sorted(self.allowed)) + "]"


@dataclass(frozen=True)
class Both(Regex):
    """One behind the other."""

    first: Regex
    second: Regex

    def __str__(self) -> str:
        return f"{self.first}{self.second}"


@dataclass(frozen=True)
class Either(Regex):
    """One of several, in no order: so a regex has finitely many derivatives, as the paper shows."""

    options: frozenset[Regex]

    def __str__(self) -> str:
        return "(?:" + "|".join(sorted(map(str, self.options))) + ")"


@dataclass(frozen=True)
class Many(Regex):
    """Any number of times."""

    inner: Regex

    def __str__(self) -> str:
        return f"(?:{self.inner})*"


def both(first: Regex, second: Regex) -> Regex:
    if isinstance(first, Nothing) or isinstance(second, Nothing):
        return Nothing()
    if isinstance(first, Empty):
        return second
    return first if isinstance(second, Empty) else Both(first, second)


def either(left: Regex, right: Regex) -> Regex:
    options = _options(left) | _options(right)
    if len(options) == 1:
        return next(iter(options))
    return Either(options) if options else Nothing()


def _options(regex: Regex) -> frozenset[Regex]:
    match regex:
        case Either(options):
            return options
        case Nothing():
            return frozenset()
        case _:
            return frozenset((regex,))


@cache
def is_whole(regex: Regex) -> bool:
    """Whether the empty text is in it."""
    match regex:
        case Empty() | Many():
            return True
        case Both(first, second):
            return is_whole(first) and is_whole(second)
        case Either(options):
            return any(is_whole(each) for each in options)
        case _:
            return False


@cache
def behind(regex: Regex, byte: int) -> Regex:
    """What may follow this byte; Nothing if no text begins with it."""
    match regex:
        case Bytes(allowed):
            return Empty() if byte in allowed else Nothing()
        case Both(first, second):
            found = both(behind(first, byte), second)
            return either(found, behind(second, byte)) if is_whole(first) else found
        case Either(options):
            return reduce(either, (behind(each, byte) for each in options))
        case Many(inner):
            return both(behind(inner, byte), regex)
        case _:
            return Nothing()


def behind_all(regex: Regex, text: bytes) -> Regex:
    for byte in text:
        regex = behind(regex, byte)
    return regex


def goes_on(regex: Regex, alphabet: bytes) -> bool:
    """Whether any text of it has a byte."""
    return any(not isinstance(behind(regex, byte), Nothing) for byte in alphabet)
