"""How the demo shows three streams at once: panels on a terminal, labelled lines anywhere else."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from deploy.demo.prompts import DemoPrompt
from deploy.demo.table import TableLine

_LINE_CHARACTERS = 88
_REFRESHES_PER_S = 12


class View(Protocol):
    """A context manager that is given text as it arrives."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None: ...

    def add(self, label: str, text: str) -> None:
        """More text of the stream called `label`."""
        ...

    def end(self, label: str, note: str) -> None:
        """That stream has ended."""
        ...


class PanelView:
    """One panel a stream, redrawn in place."""

    def __init__(self, console: Console, prompts: Sequence[DemoPrompt]) -> None:
        self._console = console
        self._prompts = prompts
        self._texts = {prompt.label: "" for prompt in prompts}
        self._notes = {prompt.label: "" for prompt in prompts}
        self._live = Live(
            get_renderable=self._draw, console=console, refresh_per_second=_REFRESHES_PER_S, transient=False
        )

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._live.stop()

    def add(self, label: str, text: str) -> None:
        self._texts[label] += text

    def end(self, label: str, note: str) -> None:
        self._notes[label] = note

    def _draw(self) -> Group:
        rows = max(3, (self._console.height - 2) // len(self._prompts) - 3)
        return Group(*(self._panel(prompt, rows) for prompt in self._prompts))

    def _panel(self, prompt: DemoPrompt, rows: int) -> Panel:
        text = Text(self._texts[prompt.label])
        lines = text.wrap(self._console, self._console.width - 4)[-rows:]
        return Panel(
            Text("\n").join(lines) if lines else Text("…"),
            title=f"[bold]{prompt.label}[/bold] · {prompt.title}",
            title_align="left",
            subtitle=self._notes[prompt.label] or None,
            subtitle_align="right",
        )


class LineView:
    """Whole lines, `label | text`, each as soon as it is full: for pipes, files and plain terminals."""

    def __init__(self, console: Console, prompts: Sequence[DemoPrompt]) -> None:
        self._console = console
        self._width = max(len(prompt.label) for prompt in prompts)
        self._pending = {prompt.label: "" for prompt in prompts}
        self._titles = {prompt.label: prompt.title for prompt in prompts}

    def __enter__(self) -> Self:
        for label, title in self._titles.items():
            self._write(label, f"> {title}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        for label in self._pending:
            self._flush(label)

    def add(self, label: str, text: str) -> None:
        *lines, rest = (self._pending[label] + text).split("\n")
        for line in lines:
            self._write(label, line)
        while len(rest) > _LINE_CHARACTERS:
            cut = rest.rfind(" ", 0, _LINE_CHARACTERS) + 1 or _LINE_CHARACTERS
            self._write(label, rest[:cut].rstrip())
            rest = rest[cut:]
        self._pending[label] = rest

    def end(self, label: str, note: str) -> None:
        self._flush(label)
        self._write(label, f"({note})")

    def _flush(self, label: str) -> None:
        if self._pending[label]:
            self._write(label, self._pending[label])
            self._pending[label] = ""

    def _write(self, label: str, line: str) -> None:
        self._console.out(f"{label:<{self._width}} | {line.strip()}".rstrip(), highlight=False)


def view_for(console: Console, prompts: Sequence[DemoPrompt]) -> View:
    """Panels where they can be redrawn and have room, lines elsewhere."""
    roomy = console.height >= 6 * len(prompts) and console.width >= 60
    if console.is_terminal and not console.is_dumb_terminal and roomy:
        return PanelView(console, prompts)
    return LineView(console, prompts)


def print_table(console: Console, labels: Sequence[str], lines: Sequence[TableLine]) -> None:
    """Parts are indented below what they are part of."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    for label in labels:
        table.add_column(label, justify="right")
    for line in lines:
        name = f"  {line.name}" if line.part else line.name
        table.add_row(name, *line.cells, style="dim" if line.part else None)
    console.print(table)
