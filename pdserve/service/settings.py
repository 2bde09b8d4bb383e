"""How one configuration key is described, read from text, and checked; the keys are in config.py."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar, get_type_hints

from pdserve.errors import Code, PdserveError

T = TypeVar("T")

PREFIX = "PDSERVE_"


class ConfigError(PdserveError, ValueError):
    """The operator must change the configuration; one line says where, what it is and what is wanted."""

    code = Code.FAILED_PRECONDITION


@dataclass(frozen=True, slots=True)
class Spec:
    """What a field's type can't say. `verify` returns what is wanted, or "" if the value is good."""

    doc: str
    unit: str = ""
    least: float | None = None
    most: float | None = None
    choices: tuple[str, ...] = ()
    verify: Callable[[Any], str] | None = None


def setting(
    default: T,
    doc: str,
    *,
    unit: str = "",
    least: float | None = None,
    most: float | None = None,
    choices: tuple[str, ...] = (),
    verify: Callable[[Any], str] | None = None,
) -> T:
    """A dataclass field with its default, meaning and bounds (inclusive)."""
    spec = Spec(doc, unit, least, most, choices, verify)
    made: T = dataclasses.field(default=default, metadata={"spec": spec})
    return made


@dataclass(frozen=True, slots=True)
class Setting:
    """One key: `kind` is str, int, float, bool, or tuple for a list of strings."""

    table: str
    key: str
    kind: type
    default: object
    spec: Spec

    @property
    def name(self) -> str:
        """The name in messages and in `Config.effective()`."""
        return f"{self.table}.{self.key}"

    @property
    def variable(self) -> str:
        """The environment variable."""
        return f"{PREFIX}{self.table.upper()}__{self.key.upper()}"

    @property
    def flag(self) -> str:
        """The command-line flag."""
        return f"--{self.table}.{self.key.replace('_', '-')}"

    def read(self, text: str, source: str) -> object:
        """The value of a text (environment, flag), checked. Raises ConfigError naming `source`."""
        value: object = text
        try:
            if self.kind is bool:
                value = {"true": True, "1": True, "false": False, "0": False}[text.strip().lower()]
            elif self.kind is int:
                value = int(text)
            elif self.kind is float:
                value = float(text)
            elif self.kind is tuple:
                value = tuple(part.strip() for part in text.split(",") if part.strip())
        except (KeyError, ValueError):
            raise self._bad(text, source, self._wanted()) from None
        return self.check(value, source)

    def check(self, value: object, source: str) -> object:
        """The value in the field's own type; a list becomes a tuple, an int a float where one is wanted.

        Raises ConfigError naming `source`, the value and what is wanted.
        """
        if self.kind is float and type(value) is int:
            value = float(value)
        if self.kind is tuple and isinstance(value, list):
            value = tuple(value)
        if type(value) is not self.kind:
            raise self._bad(value, source, self._wanted())
        if isinstance(value, tuple) and not all(isinstance(part, str) for part in value):
            raise self._bad(value, source, self._wanted())
        if isinstance(value, float) and not math.isfinite(value):
            raise self._bad(value, source, self._wanted())
        self._check_bounds(value, source)
        return value

    def _check_bounds(self, value: object, source: str) -> None:
        spec = self.spec
        if isinstance(value, int | float):
            if spec.least is not None and value < spec.least:
                raise self._bad(value, source, f"at least {spec.least:g}")
            if spec.most is not None and value > spec.most:
                raise self._bad(value, source, f"at most {spec.most:g}")
        if spec.choices:
            for part in value if isinstance(value, tuple) else (value,):
                if part not in spec.choices:
                    raise self._bad(part, source, f"one of {', '.join(spec.choices)}")
        if spec.verify is not None:
            wanted = spec.verify(value)
            if wanted:
                raise self._bad(value, source, wanted)

    def _wanted(self) -> str:
        names = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
        return names.get(self.kind, "a list of texts")

    def _bad(self, value: object, source: str, wanted: str) -> ConfigError:
        return ConfigError(f"{source}: {self.name} must be {wanted}, got {value!r}")


def settings_of(table: str, cls: type) -> tuple[Setting, ...]:
    """The keys of one component's dataclass, in order; every field must be made by `setting`."""
    hints = get_type_hints(cls)
    found = []
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        kind = tuple if hint == tuple[str, ...] else hint
        found.append(Setting(table, field.name, kind, field.default, field.metadata["spec"]))
    return tuple(found)


def check_fields(table: str, component: object) -> None:
    """For `__post_init__`: types and bounds of a component that was built in code."""
    for key in settings_of(table, type(component)):
        key.check(getattr(component, key.key), "configuration")


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint for an unknown name: the closest known one, else all of them."""
    names = list(known)
    close = difflib.get_close_matches(name.lower(), [each.lower() for each in names], n=1, cutoff=0.4)
    if close:
        return f"the nearest known one is {next(each for each in names if each.lower() == close[0])}"
    return f"known are {', '.join(names)}"
