"""How a long fetch tells what it is doing."""

from __future__ import annotations

from typing import Protocol


class ByteProgress(Protocol):
    """Called by the thread that fetches, in order: `begin` ends the phase before it."""

    def begin(self, phase: str, total_bytes: int | None) -> None:
        """A phase starts; None = nobody knows how much it is."""
        ...

    def reached(self, num_bytes: int) -> None:
        """The phase has done so many bytes since it began."""
        ...


class Silent:
    """Says nothing: for callers without a terminal."""

    def begin(self, phase: str, total_bytes: int | None) -> None:
        pass

    def reached(self, num_bytes: int) -> None:
        pass
