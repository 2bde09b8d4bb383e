"""The structures compiled last, bounded."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

from pdserve.structure import Structure

T = TypeVar("T")

MOST_ENTRIES = 256
MOST_BYTES = 64 << 20  # of what compiling them took


class StructureCache(Generic[T]):
    """Least recently used go first. One owner."""

    def __init__(self, most_entries: int = MOST_ENTRIES, most_bytes: int = MOST_BYTES) -> None:
        self._most_entries = most_entries
        self._most_bytes = most_bytes
        self._entries: OrderedDict[Structure, tuple[T, int]] = OrderedDict()
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, structure: Structure) -> T | None:
        """What was put for it, if it is still there."""
        found = self._entries.get(structure)
        if found is None:
            return None
        self._entries.move_to_end(structure)
        return found[0]

    def put(self, structure: Structure, value: T, num_bytes: int = 0) -> None:
        """Keep it, at the cost of the oldest ones; the newest stays, however large.

        num_bytes  what it takes, its text apart
        """
        self._drop(structure)
        num_bytes += structure.num_bytes
        self._entries[structure] = value, num_bytes
        self._num_bytes += num_bytes
        while len(self._entries) > 1 and (
            len(self._entries) > self._most_entries or self._num_bytes > self._most_bytes
        ):
            self._drop(next(iter(self._entries)))

    def _drop(self, structure: Structure) -> None:
        _, num_bytes = self._entries.pop(structure, (None, 0))
        self._num_bytes -= num_bytes
