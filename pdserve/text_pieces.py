"""Long texts are encoded piece by piece, and of a text of which only the end counts, only the end; with equal ids.

A text may be cut between a letter and, say, a space if no token of the vocabulary holds such two characters side by
side: then nothing is merged over the cut, and words end there. Each piece is encoded with some text before it, whose
ids must come out as they do without the piece, and are left out; so what a tokenizer does at the beginning of a text
stays there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from pdserve.errors import InvalidRequest, too_large
from pdserve.steps import Steps

PIECE_CHARACTERS = 8_192  # some milliseconds of work
MAX_UNCUT_CHARACTERS = 131_072  # more without a place for a cut is no text
_LEAD_CHARACTERS = 32  # of text before a piece; more if there is no cut nearer
_REACH = 1_024  # where a cut is looked for at first
_MOST_REACH = 16_384  # in one call of a regex, which holds the interpreter for some milliseconds

# A cut is behind a letter or digit and before ASCII that is neither, or 、 。 ，; or behind the one line end after
# something and before a letter or digit. Here in bytes, as tokens may begin and end within a character.
_SPANNED = re.compile(
    rb"(?=([0-9A-Za-z\x80-\xbf])([\x00-\x2f\x3a-\x40\x5b-\x60\x7b-\x7f]"
    rb"|\xe3(?:$|\x80(?:$|[\x81\x82]))|\xef(?:$|\xbc(?:$|\x8c)))|(\n)([0-9A-Za-z\xc2-\xf4]))"
)
_MARKS = [chr(code) for code in range(128) if not chr(code).isalnum()] + ["\u3001", "\u3002", "\uff0c"]
_KINDS = {"digit": "[0-9]", "letter": "[A-Za-z]", "other": "[^\\W\\d_\\x00-\\x7f]"}

Encode = Callable[[str], list[int]]
"""Ids of a text, without what is put around texts."""


class TextPieces:
    """Of one tokenizer. Any thread may call.

    tokens            how the vocabulary writes each token, added ones included
    piece_characters  of a piece, at least
    """

    def __init__(self, tokens: Iterable[bytes], piece_characters: int = PIECE_CHARACTERS) -> None:
        self._cut = _cut_between(_spanned(tokens))
        self._piece_characters = piece_characters

    def encode(self, text: str, encode: Encode) -> Steps[list[int]]:
        """Ids of a text. Raises InvalidRequest if there is a stretch of it that is too long and can't be cut."""
        ids = yield from self._from(text, 0, encode)
        return encode(text) if ids is None else ids

    def encode_end(self, text: str, count: int, encode: Encode) -> Steps[tuple[list[int], bool]]:
        """The last `count` ids of a text, or more; and whether they are all of it. Raises as `encode`."""
        size = max(_REACH, 4 * count)
        while True:
            begin = self._last_cut(text, len(text) - size)
            ids = yield from self._from(text, begin, encode)
            if ids is None:
                return encode(text), True
            if begin == 0 or len(ids) >= count:
                return ids, begin == 0
            size *= 2

    def _from(self, text: str, begin: int, encode: Encode) -> Steps[list[int] | None]:
        """Ids of a text from a cut on; None if this tokenizer's don't depend on what is near alone."""
        ids: list[int] = []
        while begin < len(text):
            end = self._next_cut(text, begin)
            lead = self._last_cut(text, begin - _LEAD_CHARACTERS)
            before = encode(text[lead:begin]) if lead < begin else []
            piece = encode(text[lead:end])
            if piece[: len(before)] != before:
                return None
            ids += piece[len(before) :]
            begin = end
            yield
        return ids

    def _next_cut(self, text: str, begin: int) -> int:
        """Where the piece that begins there ends."""
        place, most = begin + self._piece_characters, begin + MAX_UNCUT_CHARACTERS
        if place >= len(text):
            return len(text)
        found = self._first_cut(text, place, most)
        if found:
            return found
        if len(text) <= most:
            return len(text)
        nearer = self._last_cut(text, place - 1)
        if nearer > begin:
            return nearer
        raise _too_long_word(begin)

    def _first_cut(self, text: str, place: int, most: int) -> int:
        """The first one from `place` to `most`, or 0."""
        if self._cut is None:
            return 0
        for begin in range(place - 1, most, _MOST_REACH):
            found = self._cut.search(text, begin, min(begin + _MOST_REACH, most) + 1)
            if found is not None:
                return found.end()
        return 0

    def _last_cut(self, text: str, place: int) -> int:
        """The last one up to there, or 0. Raises InvalidRequest if it is further away than any may be."""
        if self._cut is None:
            return 0
        reach, end = _REACH, place + 1
        while end > 1:
            if end <= place - MAX_UNCUT_CHARACTERS:
                raise _too_long_word(end)
            begin = max(0, end - reach)
            cut = max((found.end() for found in self._cut.finditer(text, begin, end)), default=0)
            if cut:
                return cut
            end, reach = begin + 1, min(2 * reach, _MOST_REACH)
        return 0


def _too_long_word(begins_at: int) -> InvalidRequest:
    """begins_at: or before."""
    return too_large(
        "word",
        "the text has too long a word: no space or punctuation in so many characters",
        limit=MAX_UNCUT_CHARACTERS,
        begins_at=begins_at,
    )


def _spanned(tokens: Iterable[bytes]) -> set[tuple[str, str]]:
    """The places, as (kind, mark) or (line end, kind), in which some token reaches over a cut."""
    spanned: set[tuple[str, str]] = set()
    for token in tokens:
        for found in _SPANNED.finditer(token):
            if found[3]:
                spanned.add(("\n", _kind(found[4][0])))
            else:
                marks = [mark for mark in _MARKS if mark.encode().startswith(found[2])]
                spanned.update((_kind(found[1][0]), mark) for mark in marks)
    return spanned


def _kind(byte: int) -> str:
    return "other" if byte >= 0x80 else "digit" if byte <= 0x39 else "letter"


def _cut_between(spanned: set[tuple[str, str]]) -> re.Pattern[str] | None:
    """Matches the character before a cut. None = there is no cut in any text."""
    parts = []
    for kind, chars in _KINDS.items():
        free = "".join(re.escape(mark) for mark in _MARKS if (kind, mark) not in spanned)
        if free:
            parts.append(f"{chars}(?=[{free}])")
        if ("\n", kind) not in spanned:
            parts.append(f"(?<=\\S)\n(?={chars})")
    return re.compile("|".join(parts)) if parts else None
