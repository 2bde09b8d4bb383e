"""How one key of the configuration is read from text and checked; config.py has the keys, made by `fields.setting`."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from dataclasses import dataclass

from pdserve.errors import Code, PdserveError
from pdserve.fields import KINDS, Spec, fields_of

PREFIX = "PDSERVE_"


class ConfigError(PdserveError, ValueError):
    """The operator must change the configuration; one line says where, what it is and what is wanted."""

    code = Code.FAILED_PRECONDITION


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
    def doc(self) -> str:
        """Its meaning, and the values it may have where these are few."""
        choices = self.spec.choices
        return f"{self.spec.doc} ({', '.join(choices)})" if choices else self.spec.doc

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
        if isinstance(value, int | float) and not spec.holds(value):
            raise self._bad(value, source, spec.range)
        if spec.choices:
            for part in value if isinstance(value, tuple) else (value,):
                if part not in spec.choices:
                    raise self._bad(part, source, f"one of {', '.join(spec.choices)}")
        if spec.verify is not None:
            wanted = spec.verify(value)
            if wanted:
                raise self._bad(value, source, wanted)

    def _wanted(self) -> str:
        return KINDS.get(self.kind, "a list of texts")

    def _bad(self, value: object, source: str, wanted: str) -> ConfigError:
        return ConfigError(f"{source}: {self.name} must be {wanted}, got {value!r}")


def settings_of(table: str, cls: type) -> tuple[Setting, ...]:
    """The keys of one component's dataclass, in order; every field must be made by `setting`."""
    return tuple(Setting(table, key.name, key.kind, key.default, key.spec) for key in fields_of(cls))


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


def shown(value: object) -> str:
    """A value as a TOML file has it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return "[" + ", ".join(f'"{part}"' for part in value) + "]"
    return (
        f'"{value}"' if isinstance(value, str) else f"{value:g}" if isinstance(value, float) else str(value)
    )
