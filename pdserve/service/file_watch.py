"""Files that are read again when they have changed: keys and certificates."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

LOOK_EVERY_S = 2.0


class FileWatch:
    """Any thread; blocks on `stat`. Tells a file that was replaced, written, removed or moved here from an old one."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = tuple(files)
        self._seen = self._look()

    def has_changed(self) -> bool:
        """Whether any has since the last call, or since this watch was made."""
        before, self._seen = self._seen, self._look()
        return before != self._seen

    def _look(self) -> tuple[tuple[int, int, int] | None, ...]:
        return tuple(_signature(file) for file in self._files)


def _signature(file: Path) -> tuple[int, int, int] | None:
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
