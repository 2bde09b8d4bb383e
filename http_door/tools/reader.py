"""Text that comes in pieces, read by a generator as if it were whole: it waits where it needs more.

A format is one generator function (`Read`). Since it never sees where the pieces were cut, what it says can't depend
on that.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import TypeVar

from http_door.tools.port import Parsed

T = TypeVar("T")
Reading = Generator[None, None, T]  # each yield: no more can be said without more text
_BLANKS = re.compile(r"\s*")
MAX_HELD = 1 << 20  # characters, about: of a call; what is longer is text
MAX_BLANKS = 256  # that are held because a mark may follow


class Marks:
    """Texts to look for. None may begin another."""

    def __init__(self, *marks: str) -> None:
        self.pattern = re.compile("|".join(map(re.escape, marks)))
        self.longest = max(map(len, marks))
        self._begun = {mark[:size] for mark in marks for size in range(1, len(mark))}

    def is_begun_by(self, text: str) -> bool:
        """Whether the text is one of them without its end."""
        return text in self._begun

    def num_begun_at_end(self, text: str) -> int:
        """How many of the last characters may be the beginning of one."""
        sizes = range(min(self.longest - 1, len(text)), 0, -1)
        return next((size for size in sizes if text[-size:] in self._begun), 0)


class Reader:
    """The text from where it was read to; what was taken of it is held until it is known what it is.

    Every character is copied a bounded number of times, however the text is cut and whatever is held.
    """

    def __init__(self) -> None:
        self._text = ""
        self._at = 0  # of _text: what is before was said, or is held
        self._ended = False
        self._held: list[str] = []
        self.num_held = 0  # characters

    def add(self, text: str) -> None:
        """More text."""
        self._text = self._text[self._at :] + text
        self._at = 0

    def end(self) -> None:
        """No more will come."""
        self._ended = True

    def peek(self, size: int) -> Reading[str]:
        """The next `size` characters, or what there is before the end."""
        while len(self._text) - self._at < size and not self._ended:
            yield
        return self._text[self._at : self._at + size]

    def take(self, size: int) -> str:
        """Hold so many characters, which were seen."""
        taken = self._text[self._at : self._at + size]
        self._at += size
        self._held.append(taken)
        self.num_held += size
        return taken

    def take_run(self, pattern: re.Pattern[str]) -> Reading[None]:
        """Hold all that a pattern of the kind `[…]*` matches, to the first character that it doesn't, or MAX_HELD."""
        while self.num_held <= MAX_HELD:
            found = pattern.match(self._text, self._at)
            assert found is not None
            if found.end() > self._at:
                self.take(found.end() - self._at)
            if self._at < len(self._text) or self._ended:
                return
            yield

    def take_blanks(self) -> Reading[None]:
        """Hold white space."""
        return self.take_run(_BLANKS)

    def take_mark(self, marks: Marks) -> Reading[str]:
        """Hold the mark that stands here; "" = none of them does."""
        while True:
            found = marks.pattern.match(self._text, self._at)
            if found is not None:
                return self.take(found.end() - self._at)
            rest = self._text[self._at : self._at + marks.longest]
            if self._ended or (rest and not marks.is_begun_by(rest)):
                return ""
            yield

    def text_until(self, say: Callable[[str], None], marks: Marks) -> Reading[str]:
        """Say text as it comes, to the first mark, which is held; "" = the text has ended without one."""
        while True:
            found = marks.pattern.search(self._text, self._at)
            if found is not None:
                end = found.start()
            elif self._ended:
                end = len(self._text)
            else:
                end = len(self._text) - marks.num_begun_at_end(self._text[self._at :][-marks.longest :])
            if end > self._at:
                say(self._text[self._at : end])
                self._at = end
            if found is not None:
                return self.take(found.end() - end)
            if self._ended:
                return ""
            yield

    def say_rest(self, say: Callable[[str], None]) -> Reading[None]:
        """Say all that follows as it comes."""
        while (yield from self.peek(1)):
            rest, self._at = self._text[self._at :], len(self._text)
            say(rest)

    def mark(self) -> int:
        """A place in what is held, for `since`."""
        return len(self._held)

    def since(self, mark: int) -> str:
        """What was taken since then; it is held still."""
        return "".join(self._held[mark:])

    def release(self) -> str:
        """What is held, and hold nothing any more."""
        held = self.since(0)
        self._held.clear()
        self.num_held = 0
        return held


def without_end(text: str, characters: str | None) -> tuple[str, str]:
    """A text without such characters at its end (None = white space), and at most MAX_BLANKS of these."""
    end = max(len(text.rstrip(characters)), len(text) - MAX_BLANKS)
    return text[:end], text[end:]


class ReadingParser:
    """An `OutputParser` of a generator.

    run     reads `reader` to its end
    output  where it puts what it found
    """

    def __init__(self, reader: Reader, run: Reading[None], output: list[Parsed]) -> None:
        self._reader = reader
        self._run = run
        self._output = output

    def feed(self, text: str) -> list[Parsed]:
        self._reader.add(text)
        return self._go_on()

    def finish(self) -> list[Parsed]:
        self._reader.end()
        return self._go_on()

    def _go_on(self) -> list[Parsed]:
        next(self._run, None)
        found = self._output.copy()
        self._output.clear()
        return found
