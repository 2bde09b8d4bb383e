"""Reasoning between two marks at the beginning of the text: `<think>…</think>`, and Mistral's `[THINK]…[/THINK]`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from http_door.tools.port import Content, Parsed, Reasoning
from http_door.tools.reader import Marks, Reader, Reading, ReadingParser, without_end

_BREAKS = re.compile(r"[\r\n]*")


@dataclass(frozen=True, slots=True)
class ThoughtMarks:
    """Around the reasoning. Line breaks beside them belong to them."""

    begin: str
    end: str

    def are_open_in(self, prompt_end: str) -> bool:
        """Whether the text that follows this prompt is reasoning from its first character on.

        So it is where the template has written the first mark, or where the reasoning of the last message goes on.
        """
        return prompt_end.rfind(self.begin) > prompt_end.rfind(self.end)


REASONING = {"think": ThoughtMarks("<think>", "</think>"), "mistral": ThoughtMarks("[THINK]", "[/THINK]")}


def reasoning_parser(marks: ThoughtMarks, *, is_open: bool) -> ReadingParser:
    """A parser of one text. is_open: the text begins inside the reasoning, by `ThoughtMarks.are_open_in`."""
    reader, parts = Reader(), list[Parsed]()
    return ReadingParser(reader, _read(reader, parts, marks, is_open), parts)


def _read(text: Reader, parts: list[Parsed], marks: ThoughtMarks, is_open: bool) -> Reading[None]:
    if not is_open:
        yield from text.take_blanks()
        is_open = bool((yield from text.take_mark(Marks(marks.begin))))
        held = text.release()
        if not is_open and held:
            parts.append(Content(held))
    if is_open:
        reasoning = _Reasoning(parts)
        closed = yield from text.text_until(reasoning.say, Marks(marks.end))
        if not closed:
            reasoning.end()
            return
        text.release()
        yield from text.take_run(_BREAKS)
        text.release()
    yield from text.say_rest(lambda rest: parts.append(Content(rest)))


class _Reasoning:
    """Says reasoning without the line breaks at its ends."""

    def __init__(self, parts: list[Parsed]) -> None:
        self._parts = parts
        self._breaks = ""
        self._begun = False

    def say(self, text: str) -> None:
        """More of it."""
        if not self._begun:
            text = text.lstrip("\r\n")
            self._begun = bool(text)
        text = self._breaks + text
        said, self._breaks = without_end(text, "\r\n")
        if said:
            self._parts.append(Reasoning(said))

    def end(self) -> None:
        """The text has ended inside."""
        if self._breaks:
            self._parts.append(Reasoning(self._breaks))
