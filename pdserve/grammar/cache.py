"""Structures that were compiled of late, bounded."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

from pdserve.structure import Structure

T = TypeVar("T")

MOST_ENTRIES = 256
MOST_BYTES = (
    1 << 20
)  # of the structures' texts; compiled, a text takes up to some hundred times as much memory


class StructureCache(Generic[T]):
    """Least recently used go first. One owner."""

    def __init__(self, most_entries: int = MOST_ENTRIES, most_bytes: int = MOST_BYTES) -> None:
        self._most_entries = most_entries
        self._most_bytes = most_bytes
        self._entries: OrderedDict[Structure, T] = OrderedDict()
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, structure: Structure) -> T | None:
        """What was put for it, if it is still there."""
        found = self._entries.get(structure)
        if found is not None:
            self._entries.move_to_end(structure)
        return found

    def put(self, structure: Structure, value: T) -> None:
        """Keep it, at the cost of the oldest ones; the newest stays, however large."""
        if structure not in self._entries:
            self._num_bytes += structure.num_bytes
        self._entries[structure] = value
        self._entries.move_to_end(structure)
        while len(self._entries) > 1 and (
            len(self._entries) > self._most_entries or self._num_bytes > self._most_bytes
        ):
            oldest, _ = self._entries.popitem(last=False)
            self._num_bytes -= oldest.num_bytes

    def clear(self) -> None:
        """Forget all: they belong to another vocabulary."""
        self._entries.clear()
        self._num_bytes = 0
