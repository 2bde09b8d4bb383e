r"""Texts and regexes between the slashes of the grammar library's own language.

Neither a slash nor an escaped backslash is left there: whoever reads `\\/` has to know whether the slash is quoted.
"""

from __future__ import annotations

import re

from pdserve.errors import InvalidRequest

_PIECE = re.compile(r"\\(.)|/", re.DOTALL)
_SLASH, _BACKSLASH = r"\x2F", r"\x5C"


def quoted_regex(regex: str) -> str:
    """A regex of the same language. Raises InvalidRequest for a backslash with nothing behind it."""

    def quoted(piece: re.Match[str]) -> str:
        match piece[0]:
            case "/" | "\\/":
                return _SLASH
            case "\\\\":
                return _BACKSLASH
        return piece[0]

    if (len(regex) - len(regex.rstrip("\\"))) % 2:
        raise InvalidRequest(
            "regex can't be used", why="nothing follows the backslash", offset=len(regex) - 1
        )
    return f"/{_PIECE.sub(quoted, regex)}/"


def offset_in_regex(regex: str, quoted_offset: int) -> int:
    """Where in a regex stands what stands there in its quoted form, both without slashes around."""
    passed = grown = 0
    for piece in _PIECE.finditer(regex):
        width = 4 if piece[0] in ("/", "\\/", "\\\\") else len(piece[0])
        if piece.start() + grown + width > quoted_offset:
            break
        passed = piece.end()
        grown += width - len(piece[0])
    return max(passed, quoted_offset - grown)


def quoted_text(text: str) -> str:
    """A regex of this text alone."""
    return f"/{''.join(map(quoted_char, text))}/" if text else '""'


def quoted_char(char: str) -> str:
    """One character, in a regex or in a class of one."""
    return char if char.isascii() and char.isalnum() else rf"\x{{{ord(char):X}}}"
