"""Books that must agree: what is found when they don't."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class BooksWrong:
    """An owner of a worker has found that its books don't add up; said once.

    book   which ones: "blocks", "grants", "idle", "credits", "leases"
    facts  what they say, for the log
    """

    book: str
    facts: Mapping[str, object] = field(default_factory=dict)
