"""Typed look-ups in a JSON object of config.json: one line says which key is wrong and what it holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pdserve.modelstore.errors import BadModel


class Section:
    """All look-ups raise BadModel with key and value; null counts as absent."""

    def __init__(self, raw: Mapping[str, Any], prefix: str = "") -> None:
        """prefix: what stands before a key in messages."""
        self.raw = raw
        self._prefix = prefix

    def part(self, key: str) -> Section | None:
        """An object inside this one; None if there is none, or nothing in it."""
        value = self.raw.get(key) or None
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.bad("config.json needs an object here", key)
        return Section(value, f"{self._prefix}{key}.")

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive one."""
        value = self._value(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 1 << 32:
            raise self.bad("config.json needs a positive integer here", key)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive one; its default may be 0."""
        if default is not None and self.raw.get(key) is None:
            return default
        value = self.raw.get(key)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
            raise self.bad("config.json needs a positive number here", key)
        return float(value)

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        """So many positive ones."""
        value = self.raw.get(key)
        if not isinstance(value, list) or len(value) != count:
            raise self.bad("config.json needs a list of this many numbers here", key, want=count)
        row = Section({str(index): each for index, each in enumerate(value)}, f"{self._prefix}{key}.")
        return tuple(row.number(str(index)) for index in range(count))

    def flag(self, key: str, default: bool = False) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.bad("config.json needs true or false here", key)
        return value

    def choice(self, key: str, choices: Mapping[str, str], default: str) -> str:
        """What a value stands for, of those that are known."""
        value = self._value(key, default)
        if not isinstance(value, str) or value not in choices:
            raise self.bad("this value is not supported", key, supported=", ".join(choices))
        return choices[value]

    def bad(self, sentence: str, key: str, **fields: object) -> BadModel:
        """The error about one key."""
        return BadModel(sentence, key=f"{self._prefix}{key}", value=self.raw.get(key), **fields)

    def _value(self, key: str, default: object) -> object:
        value = self.raw.get(key)
        return default if value is None else value
