"""What a request wants its text to be: JSON by a schema, any JSON object, a regex's match, one of several texts, or a
word of a grammar. docs/sampling.md defines each."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Self


class StructureKind(Enum):
    """`value` is the request's field."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    CHOICES = "choices"
    GRAMMAR = "grammar"


@dataclass(frozen=True, slots=True)
class Structure:
    """As the request gives it, not looked at yet.

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
