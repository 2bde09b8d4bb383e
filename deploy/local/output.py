"""Where the children's output goes: to one stream under prefixes, or to a folder with a file each."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import TracebackType
from typing import IO, Protocol, Self


class ProcessOutput(Protocol):
    """Takes lines. Event-loop thread only; a line is small and goes to a terminal, a pipe or the page cache."""

    def line(self, source: str, text: str) -> None:
        """One line of the process called `source`."""
        ...


class PrefixedOutput:
    """All on one stream, `decode-0 | …`; a reader who has gone away is no reason to stop serving."""

    def __init__(self, stream: IO[str], width: int) -> None:
        self._stream = stream
        self._width = width

    def line(self, source: str, text: str) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._stream.write(f"{source:<{self._width}} | {text}\n")
            self._stream.flush()


class FolderOutput:
    """FOLDER/ID.log for each process, appended to over restarts. A context manager; raises OSError."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._files: dict[str, IO[str]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def line(self, source: str, text: str) -> None:
        file = self._files.get(source)
        if file is None:
            file = self._files[source] = (self._folder / f"{source}.log").open("a", encoding="utf-8")
        file.write(text + "\n")
        file.flush()
