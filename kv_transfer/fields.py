"""Reads the fields of a frame's body, each checked against its bound; an error names the frame and the field."""

from __future__ import annotations

from collections.abc import Mapping

from pdserve.errors import InvalidRequest

U64 = 2**64 - 1
U32 = 2**32 - 1


class Fields:
    """The body of one frame, a map that came from outside. Every getter raises InvalidRequest."""

    def __init__(self, frame: str, body: Mapping[object, object]) -> None:
        self._frame = frame
        self._body = body

    def number(self, name: str, *, high: int = U64) -> int:
        """An integer in [0, high]."""
        return self._number(name, self._get(name), high)

    def flag(self, name: str) -> bool:
        value = self._get(name)
        if not isinstance(value, bool):
            raise self.malformed(name, "a boolean", value)
        return value

    def text(self, name: str, *, max_chars: int) -> str:
        return self._text(name, self._get(name), max_chars)

    def raw(self, name: str, *, num_bytes: int) -> bytes:
        """Exactly so many bytes."""
        value = self._get(name)
        if not isinstance(value, bytes) or len(value) != num_bytes:
            raise self.malformed(name, f"{num_bytes} bytes", value)
        return value

    def is_none(self, name: str) -> bool:
        return self._get(name) is None

    def texts(self, name: str, *, max_items: int, max_chars: int) -> tuple[str, ...]:
        return tuple(
            self._text(name, item, max_chars) for item in self._items(name, self._get(name), max_items)
        )

    def numbers(self, name: str, *, max_items: int, high: int = U32) -> tuple[int, ...]:
        return tuple(self._number(name, item, high) for item in self._items(name, self._get(name), max_items))

    def rows(self, name: str, *, max_rows: int, width: int, high: int = U64) -> tuple[tuple[int, ...], ...]:
        """A list of rows of `width` integers each."""
        rows: list[tuple[int, ...]] = []
        for item in self._items(name, self._get(name), max_rows):
            row = self._items(name, item, width)
            if len(row) != width:
                raise self.malformed(name, f"rows of {width}", item)
            rows.append(tuple(self._number(name, value, high) for value in row))
        return tuple(rows)

    def mixed(self, name: str, *, width: int) -> tuple[object, ...]:
        """A list of exactly so many values of any kind, for the caller to check."""
        value = self._items(name, self._get(name), width)
        if len(value) != width:
            raise self.malformed(name, f"a list of {width}", value)
        return tuple(value)

    def pairs(self, name: str, *, max_items: int) -> tuple[tuple[int, float], ...]:
        """A list of (integer, real) pairs."""
        found: list[tuple[int, float]] = []
        for item in self._items(name, self._get(name), max_items):
            pair = self._items(name, item, 2)
            if len(pair) != 2:
                raise self.malformed(name, "pairs", item)
            found.append((self._number(name, pair[0], U32), self._real(name, pair[1])))
        return tuple(found)

    def real(self, name: str) -> float:
        return self._real(name, self._get(name))

    def text_map(self, name: str, *, max_items: int, max_chars: int) -> dict[str, str]:
        value = self._get(name)
        if not isinstance(value, dict) or len(value) > max_items:
            raise self.malformed(name, f"a map of at most {max_items}", value)
        return {
            self._text(name, key, max_chars): self._text(name, item, max_chars) for key, item in value.items()
        }

    def malformed(self, name: str, want: str, got: object) -> InvalidRequest:
        """The error that names this field; of the value only its first characters are kept."""
        return InvalidRequest("malformed frame", frame=self._frame, field=name, want=want, got=repr(got)[:60])

    def _get(self, name: str) -> object:
        if name not in self._body:
            raise self.malformed(name, "the field", "nothing")
        return self._body[name]

    def _number(self, name: str, value: object, high: int) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= high:
            raise self.malformed(name, f"an integer in 0..{high}", value)
        return value

    def _real(self, name: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.malformed(name, "a number", value)
        return float(value)

    def _text(self, name: str, value: object, max_chars: int) -> str:
        if not isinstance(value, str) or len(value) > max_chars:
            raise self.malformed(name, f"text of at most {max_chars} characters", value)
        return value

    def _items(self, name: str, value: object, max_items: int) -> list[object]:
        if not isinstance(value, list) or len(value) > max_items:
            raise self.malformed(name, f"a list of at most {max_items}", value)
        return value
