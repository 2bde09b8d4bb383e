"""Stop strings: text that may begin one is held back, together with its token ids, until it is decided.

A token is released whole or not at all, so that a client that resumes elsewhere with the ids it was shown has
been shown exactly the text of these ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReleasedText:
    """Token ids and the text that now may be shown; `stopped`: a stop string is complete, the choice ends here."""

    token_ids: tuple[int, ...]
    text: str
    stopped: bool = False


class StopText:
    """Filter of one choice's text. Event-loop thread only.

    stops    strings that end the choice; () = everything is released at once
    include  show the stop string itself
    """

    def __init__(self, stops: Sequence[str], include: bool) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._ids: list[int] = []  # held, oldest first
        self._ends: list[int] = []  # where the text of each held id ends in _text
        self._text = ""
        self._num_shown = (
            0  # characters at the head of _text that are out already: a stop string may begin there
        )
        self._num_passed = 0  # characters at its head in which none may end any more

    def push(self, token_id: int, text: str) -> ReleasedText:
        """Take the next token and the text that it completes ("" inside a character)."""
        if not self._stops:
            return ReleasedText((token_id,), text)
        self._hold(token_id, text)
        stop = self._first_stop()
        if stop is not None:
            begin, end = stop
            self._text = self._text[: end if self._include else begin]
            return ReleasedText(*self._take_all(), stopped=True)
        return self._take_decided()

    def pass_through(self, token_id: int, text: str) -> ReleasedText:
        """Take a token whose text can't end the choice (before min_tokens); a stop string may begin in it."""
        if not self._stops:
            return ReleasedText((token_id,), text)
        self._hold(token_id, text)
        self._num_passed = len(self._text)
        return self._take_decided()

    def note_shown(self) -> None:
        """All that is held has been shown by another router: it is not given out, but a stop string may begin in it."""
        self._ids, self._ends = [], []
        self._num_shown = len(self._text)

    def flush(self, text: str = "") -> ReleasedText:
        """The choice has ended otherwise: all that is held, and the detokenizer's last text behind it."""
        self._text += text
        return ReleasedText(*self._take_all())

    def _hold(self, token_id: int, text: str) -> None:
        self._text += text
        self._ids.append(token_id)
        self._ends.append(len(self._text))

    def _first_stop(self) -> tuple[int, int] | None:
        """Begin and end of the stop string that begins first, the longer one at equal begin."""
        found: tuple[int, int] | None = None
        for stop in self._stops:
            begin = self._text.find(stop, max(0, self._num_passed - len(stop) + 1))
            if begin >= 0 and (found is None or (begin, -len(stop)) < (found[0], found[0] - found[1])):
                found = (begin, begin + len(stop))
        return found

    def _num_undecided(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(self._text)), longest, -1):
                if self._text.endswith(stop[:length]):
                    longest = length
                    break
        return longest

    def _take_decided(self) -> ReleasedText:
        limit = len(self._text) - self._num_undecided()
        count = 0
        while count < len(self._ids) and self._ends[count] <= limit:
            count += 1
        if count == 0:
            return ReleasedText((), "")
        cut = self._ends[count - 1]
        released = ReleasedText(tuple(self._ids[:count]), self._text[self._num_shown : cut])
        self._text = self._text[cut:]
        self._num_shown, self._num_passed = 0, max(0, self._num_passed - cut)
        del self._ids[:count]
        self._ends = [end - cut for end in self._ends[count:]]
        return released

    def _take_all(self) -> tuple[tuple[int, ...], str]:
        taken = (tuple(self._ids), self._text[self._num_shown :])
        self._ids, self._ends, self._text = [], [], ""
        self._num_shown = self._num_passed = 0
        return taken
