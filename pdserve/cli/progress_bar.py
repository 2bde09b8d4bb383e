"""Progress on standard error: a bar in a terminal, one line a phase elsewhere."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)


class ProgressBar:
    """A `ByteProgress` for people; a context manager. Called by one thread at a time."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._is_terminal = console.is_terminal
        self._task: TaskID | None = None
        self._total_bytes: int | None = None

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._finish()
        self._progress.stop()

    def begin(self, phase: str, total_bytes: int | None) -> None:
        self._finish()
        self._total_bytes = total_bytes
        self._task = self._progress.add_task(phase, total=total_bytes)
        if not self._is_terminal:
            sys.stderr.write(f"{phase}\n")

    def reached(self, num_bytes: int) -> None:
        if self._task is not None:
            self._progress.update(self._task, completed=num_bytes)

    def _finish(self) -> None:
        if self._task is not None:
            total = self._total_bytes if self._total_bytes is not None else 1
            self._progress.update(self._task, total=total, completed=total)


class CountBar:
    """A bar of things that end one by one, with how many failed; nothing but in a terminal. A context manager."""

    def __init__(self, total: int) -> None:
        console = Console(stderr=True)
        self._progress = Progress(
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("", total=total)
        self._num_failed = 0

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def one_more(self, *, failed: bool) -> None:
        """One has ended."""
        self._num_failed += failed
        said = f"{self._num_failed} failed" if self._num_failed else ""
        self._progress.update(self._task, advance=1, description=said)
