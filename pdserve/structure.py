"""What a request wants its text to be: JSON by a schema, any JSON object, a regex's match, one of several texts, or a
word of a grammar. docs/sampling.md defines each."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Self

from pdserve.errors import InvalidRequest
from pdserve.fields import Field, Spec, check_unicode

MAX_BYTES = 64 << 10  # of a schema, regex or grammar, or of all choices; every attempt carries them
CHOICES = Field("choices", tuple, str, (), Spec("one of these", max_items=1024, characters=(1, 1024)))


class StructureKind(Enum):
    """`value` is the request's field."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    CHOICES = "choices"
    GRAMMAR = "grammar"


@dataclass(frozen=True, slots=True)
class Structure:
    """As the request gives it, not compiled yet.

    texts  the schema, the regex, the grammar: one; choices: all of them; json_object: none
    """

    kind: StructureKind
    texts: tuple[str, ...] = ()

    @classmethod
    def json_schema(cls, schema: str | Mapping[str, Any]) -> Self:
        """JSON that satisfies the schema: as text, or as what json.loads makes of it."""
        text = schema if isinstance(schema, str) else json.dumps(schema)
        return cls(StructureKind.JSON_SCHEMA, (text,))

    @classmethod
    def json_object(cls) -> Self:
        """Any JSON object."""
        return cls(StructureKind.JSON_OBJECT)

    @classmethod
    def regex(cls, regex: str) -> Self:
        """Text that the regex matches as a whole."""
        return cls(StructureKind.REGEX, (regex,))

    @classmethod
    def choices(cls, texts: Iterable[str]) -> Self:
        """One of these texts."""
        return cls(StructureKind.CHOICES, tuple(texts))

    @classmethod
    def grammar(cls, grammar: str) -> Self:
        """A word of a grammar in Lark or GBNF."""
        return cls(StructureKind.GRAMMAR, (grammar,))

    @property
    def text(self) -> str:
        """Of a kind that has one."""
        (text,) = self.texts
        return text

    @property
    def num_bytes(self) -> int:
        """What each attempt carries of it."""
        return sum(len(text.encode()) for text in self.texts)

    def check(self) -> None:
        """Size and form, before anything is compiled. Raises InvalidRequest."""
        name = self.kind.value
        for text in self.texts:
            check_unicode(name, text)
        if self.num_bytes > MAX_BYTES:
            raise InvalidRequest(f"{name} is too large", limit=f"{MAX_BYTES} bytes", value=self.num_bytes)
        if self.kind is StructureKind.CHOICES:
            if not self.texts:
                raise InvalidRequest("choices must not be empty")
            CHOICES.check(self.texts)
            for place, text in enumerate(self.texts):
                if "\0" in text:
                    raise InvalidRequest(f"choices[{place}] must not hold a NUL character")
        elif self.kind is not StructureKind.JSON_OBJECT and not self.text.strip():
            raise InvalidRequest(f"{name} must not be empty")
