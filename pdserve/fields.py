"""What a field's type can't say, said where the field is declared: its meaning, its bounds, its flag.

Requests and the configuration are checked by it; command-line flags and tables of the documentation are made from it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral, Real
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from pdserve.errors import InvalidRequest, too_large

T = TypeVar("T")

KINDS: dict[type, str] = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
UINT32 = (1 << 32) - 1
UINT64 = (1 << 64) - 1
_FLOAT32 = 3.4028234663852886e38  # the largest that a message can carry
_MAX_HEADER = 2048
_ID = re.compile(r"[A-Za-z0-9._:-]{0,64}")


@dataclass(frozen=True, slots=True)
class Spec:
    """Meaning and bounds of one field; where a bound doesn't apply to the field's type it is left out.

    least, most, above  of a number, or of the bias in a list of (id, bias); `above` itself is out; most inf = finite
    max_items           of a list
    characters          least and most of a text, or of each text in a list
    choices             the only values
    verify              what is wanted, or "" if the value is good
    means               what the default stands for, if it doesn't say so itself
    flag                if it isn't `--` and the field's name
    """

    doc: str
    unit: str = ""
    least: float | None = None
    most: float | None = None
    above: float | None = None
    max_items: int | None = None
    characters: tuple[int, int] | None = None
    choices: tuple[str, ...] = ()
    verify: Callable[[Any], str] | None = None
    means: str = ""
    flag: str = ""

    @property
    def range(self) -> str:
        """The bounds of a number in words; "" if there are none."""
        if self.least is not None and self.most is not None and self.most < math.inf:
            if self.least == -self.most:
                return f"±{_plain(self.most)}"
            return f"{_plain(self.least)} to {_plain(self.most)}"
        bounds = (("above", self.above), ("at least", self.least), ("at most", self.most))
        return ", ".join(
            "finite" if bound == math.inf else f"{word} {_plain(bound)}"
            for word, bound in bounds
            if bound is not None
        )

    def holds(self, value: float) -> bool:
        """Whether a number is finite and within the bounds."""
        return (
            -_FLOAT32 <= value <= _FLOAT32  # NaN isn't
            and (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most)
        )


def setting(default: T, doc: str, **bounds: Any) -> T:
    """A dataclass field with its default, meaning, and bounds as in Spec."""
    made: T = dataclasses.field(default=default, metadata={"spec": Spec(doc, **bounds)})
    return made


@dataclass(frozen=True, slots=True)
class Field:
    """One field that was made by `setting`.

    kind  bool, int, float, str; tuple for a list
    item  of a list: int for ids, str, or tuple for (id, bias)
    """

    name: str
    kind: type
    item: type | None
    default: Any
    spec: Spec

    @property
    def flag(self) -> str:
        """The flag of a request's field."""
        return self.spec.flag or f"--{self.name.replace('_', '-')}"

    @property
    def default_text(self) -> str:
        """The default in words; "" for a list that is empty and means nothing more."""
        means = self.spec.means
        if self.default is None or self.default == ():
            return means
        value = str(self.default).lower() if self.kind is bool else f"{self.default:g}"
        return f"{value} = {means}" if means else value

    @property
    def limit_text(self) -> str:
        """All its bounds in words."""
        spec, parts = self.spec, []
        if spec.max_items is not None:
            parts.append(f"at most {spec.max_items:,}")
        if spec.characters is not None:
            parts.append("{} to {} characters".format(*spec.characters))
        return ", ".join(part for part in (*parts, spec.range) if part)

    def value_of(self, given: Any) -> Any:
        """What the field holds, from what a message or a command line gives; of two biases of one id the later."""
        if self.item is None:
            return given
        return tuple(sorted(dict(given).items()) if self.item is tuple else given)

    def check(self, value: Any) -> None:
        """Raises InvalidRequest naming the field, what it must be, and the value; of ids `Limits` knows the bound."""
        if value is None and self.default is None:
            return
        if self.item is None:
            self._check_one(self.name, self.kind, value)
            return
        if not isinstance(value, tuple | list):
            raise InvalidRequest(f"{self.name} must be a list", value=repr(value)[:80])
        self.check_count(len(value))
        if self.item is tuple:
            for token_id, number in value:
                self._check_one(f"{self.name}[{token_id}]", float, number)
        elif self.item is str:
            for place, text in enumerate(value):
                self._check_one(f"{self.name}[{place}]", str, text)

    def check_count(self, count: int) -> None:
        """Of a list's entries, which needn't have been read for it."""
        if self.spec.max_items is not None and count > self.spec.max_items:
            raise too_large(
                self.name, f"{self.name} has too many entries", limit=self.spec.max_items, value=count
            )

    def _check_one(self, name: str, kind: type, value: Any) -> None:
        if not _is_of(kind, value):
            raise InvalidRequest(f"{name} must be {KINDS[kind]}", value=repr(value)[:80])
        spec = self.spec
        if kind is not str:
            if not spec.holds(value):
                raise InvalidRequest(f"{name} out of range", limit=spec.range, value=value)
            return
        if spec.characters is not None and not spec.characters[0] <= len(value) <= spec.characters[1]:
            limit = "{} to {}".format(*spec.characters)
            raise InvalidRequest(f"{name}'s length is out of range", limit=limit, value=len(value))
        check_unicode(name, value)
        if spec.verify is not None and (wanted := spec.verify(value)):
            raise InvalidRequest(f"{name} must be {wanted}", value=value[:80])


@functools.cache
def fields_of(cls: type) -> tuple[Field, ...]:
    """The fields of a dataclass that were made by `setting`, in order."""
    hints = get_type_hints(cls)
    return tuple(
        Field(field.name, *_kind_of(hints[field.name]), field.default, field.metadata["spec"])
        for field in dataclasses.fields(cls)
        if "spec" in field.metadata
    )


def check_fields(record: Any) -> None:
    """Raises InvalidRequest for the first of a request's fields that is out of its bounds, by name."""
    for field in fields_of(record.__class__):
        field.check(getattr(record, field.name))


def check_unicode(name: str, text: str) -> None:
    """Raises InvalidRequest for a text with a lone surrogate: no message can carry it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{name} can't be encoded as UTF-8", at=error.start) from None


def plain_id(text: str) -> str:
    """A `verify` for names of requests and processes."""
    return "" if _ID.fullmatch(text) else "at most 64 characters of [A-Za-z0-9._:-]"


def plain_header(text: str) -> bool:
    """Whether it can go along as metadata of a gRPC call, beside others: all of them have 8 KiB."""
    return len(text) <= _MAX_HEADER and text.isascii() and text.isprintable()


def _is_of(kind: type, value: object) -> bool:
    """Whole numbers will do for fractions, and NumPy's numbers are numbers; True and False aren't."""
    if type(value) is kind or isinstance(value, bool):
        return type(value) is kind
    wanted: type = {int: Integral, float: Real}.get(kind, kind)
    return isinstance(value, wanted)


def _kind_of(hint: Any) -> tuple[type, type | None]:
    """What `int`, `int | None`, `tuple[int, ...]` or `tuple[tuple[int, float], ...]` is."""
    if get_origin(hint) is tuple:
        item = get_args(hint)[0]
        return tuple, get_origin(item) or item
    kinds = [each for each in get_args(hint) if each is not NoneType]
    return (kinds[0] if kinds else hint), None


def _plain(number: float) -> str:
    bits = int(number).bit_length()
    return f"2^{bits} - 1" if bits >= 32 and number == (1 << bits) - 1 else f"{number:g}"
