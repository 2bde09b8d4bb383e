"""What a request wants its text to be: JSON by a schema, any JSON object, a regex's match, one of several texts, or a
word of a grammar. docs/sampling.md defines each."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


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

    @property
    def text(self) -> str:
        """Of a kind that has one."""
        (text,) = self.texts
        return text

    @property
    def num_bytes(self) -> int:
        """What each attempt carries of it."""
        return sum(len(text.encode()) for text in self.texts)
