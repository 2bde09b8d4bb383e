"""What an operator sees of a cluster: lines anywhere; in a terminal few of them, and a bar while models load."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import IO, TYPE_CHECKING, Protocol, Self

from deploy.local.output import ProcessOutput

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

_SOURCE = "up"
_MB = 1_000_000
ERROR_PREFIX = "error: "  # of the line with which a process of ours ends


class LoadedPart(Protocol):
    """How far one worker has loaded its weights; 0 of 0 bytes: nobody knows yet."""

    @property
    def num_bytes(self) -> int: ...
    @property
    def total_bytes(self) -> int: ...


class Screen(Protocol):
    """Event-loop thread only."""

    def tell(self, text: str) -> None:
        """A line of the supervisor, for people."""
        ...

    def say(self, text: str) -> None:
        """A line on standard output, for which a script may wait."""
        ...

    def loading(self, parts: Sequence[LoadedPart]) -> None:
        """How far all workers are that load at present or have loaded; none: there is nothing to wait for."""
        ...


class PlainScreen:
    """Lines among those of the children."""

    def __init__(self, output: ProcessOutput) -> None:
        self._output = output

    def tell(self, text: str) -> None:
        self._output.line(_SOURCE, text)

    def say(self, text: str) -> None:
        _say(text)

    def loading(self, parts: Sequence[LoadedPart]) -> None:
        pass


class TerminalScreen:
    """A context manager; also the output of the children, whose lines stay above the bar.

    The line with which a child ends is not shown: the supervisor says it, with what it does about it.
    """

    def __init__(self, stream: IO[str], width: int) -> None:
        from rich.console import Console

        self._console: Console = Console(file=stream, highlight=False, markup=False, soft_wrap=True)
        self._width = width
        self._bar: Progress | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.loading(())

    def line(self, source: str, text: str) -> None:
        """See `ProcessOutput`."""
        if not text.startswith(ERROR_PREFIX):
            self.tell(f"{source:<{self._width}} | {text}")

    def tell(self, text: str) -> None:
        self._console.print(text)

    def say(self, text: str) -> None:
        _say(text)

    def loading(self, parts: Sequence[LoadedPart]) -> None:
        if not parts:
            if self._bar is not None:
                self._bar.stop()
                self._bar = None
            return
        if self._bar is None:
            self._bar = self._new_bar(len(parts))
        # All load the same model: those that don't know its size yet will read as much as the others.
        most = max(part.total_bytes for part in parts)
        total = sum(part.total_bytes or most for part in parts)
        done = sum(part.num_bytes for part in parts)
        size = f"{done / _MB:,.0f} of {total / _MB:,.0f} MB" if total else ""
        self._bar.update(self._bar.task_ids[0], total=total or None, completed=done, size=size)
        self._bar.refresh()

    def _new_bar(self, num_workers: int) -> Progress:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[size]}"),
            TimeElapsedColumn(),
            console=self._console,
            auto_refresh=False,  # the supervisor looks often enough; no thread for it
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        workers = "1 worker" if num_workers == 1 else f"{num_workers} workers"
        bar.add_task(f"loading {workers}", total=None, size="")
        bar.start()
        return bar


def _say(text: str) -> None:
    with contextlib.suppress(BrokenPipeError):  # a reader who has gone away is no reason to stop serving
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
