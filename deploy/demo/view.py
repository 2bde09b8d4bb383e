"""How the demo shows three streams at once: panels on a terminal, labelled lines anywhere else."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from deploy.demo.prompts import DemoPrompt

_LINE_CHARACTERS = 88
_REFRESHES_PER_S = 12


class View(Protocol):
    """Is given text as it arrives."""

    def add(self, label: str, text: str) -> None:
        """More text of the stream called `label`."""
        ...

    def end(self, label: str, note: str) -> None:
        """That stream has ended."""
        ...


@contextlib.contextmanager
def view_on(console: Console, prompts: Sequence[DemoPrompt]) -> Iterator[View]:
    """Panels where they can be redrawn and have room, lines elsewhere."""
    roomy = console.height >= 6 * len(prompts) and console.width >= 60
    if console.is_terminal and not console.is_dumb_terminal and roomy:
        panels = PanelView(console, prompts)
        with Live(get_renderable=panels.draw, console=console, refresh_per_second=_REFRESHES_PER_S):
            yield panels
        return
    lines = LineView(console, prompts)
    try:
        yield lines
    finally:
        lines.flush()


class PanelView:
    """One panel a stream, to be redrawn in place."""

    def __init__(self, console: Console, prompts: Sequence[DemoPrompt]) -> None:
        self._console = console
        self._prompts = prompts
        self._texts = {prompt.label: "" for prompt in prompts}
        self._notes = {prompt.label: "" for prompt in prompts}

    def add(self, label: str, text: str) -> None:
        self._texts[label] += text

    def end(self, label: str, note: str) -> None:
        self._notes[label] = note

    def draw(self) -> Group:
        """All panels, which show the ends of their texts."""
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
        for prompt in prompts:
            self._write(prompt.label, f"> {prompt.title}")

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
        self.add(label, f"\n({note})\n" if self._pending[label] else f"({note})\n")

    def flush(self) -> None:
        """What is left of streams that broke off."""
        for label, rest in self._pending.items():
            if rest:
                self._write(label, rest)

    def _write(self, label: str, line: str) -> None:
        self._console.out(f"{label:<{self._width}} | {line.strip()}".rstrip(), highlight=False)
